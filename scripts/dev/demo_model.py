"""A Qwen3.5 text model with its multi-token-prediction (MTP) head, in PyTorch, for training on a CPU.

It is equal to `Qwen3_5ForCausalLM` of transformers (`train_demo.py check` compares the logits) plus the MTP
block, which transformers leaves out; parameter names are those of the published checkpoints. Every sequence
is one dense row of tokens from position 0: there is no KV cache, no padding mask, no vision part. It knows
nothing of files or training.

The head, at position i, takes the hidden row of position i - 1 and the token of position i, and predicts
token i + 1, as the trunk does at i. At depth 1 the hidden rows are the trunk's, after its final norm; at
depth d > 1 they are the head's own of depth d - 1, after `mtp.norm`. When drafting at depth d, the head's
cells were made from true hidden rows up to d - 1 positions back, and from its own since: attention at depth d
sees just that (`attend`), so that training and drafting agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 32


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the fields carry the names of a Hugging Face text config."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 1152
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 6
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (3, 3, 2)
    max_position_embeddings: int = 4096

    @property
    def layer_types(self) -> list[str]:
        return [
            "linear_attention" if (i + 1) % self.full_attention_interval else "full_attention"
            for i in range(self.num_hidden_layers)
        ]


class RMSNorm(nn.Module):
    """RMS norm whose weight is stored as its distance from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class GatedRMSNorm(nn.Module):
    """RMS norm with a plain weight, times silu of the gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float() * F.silu(gate.float())).type_as(gate)


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, positions: Tensor, n_rot: int, theta: float) -> Tensor:
    """Rotary embedding, by halves, of the first n_rot dimensions of x (..., *positions.shape, head_dim).

    The three sections of M-RoPE carry the same position for text, so they do not show.
    """
    frequency = theta ** -(torch.arange(0, n_rot, 2, dtype=torch.float32) / n_rot)
    angle = positions.float()[..., None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., : n_rot // 2], x[..., n_rot // 2 : n_rot], x[..., n_rot:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention; q and k normed, partial rotary positions, a sigmoid gate on the output."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, 2 * q_size, bias=False)  # per head: query, then gate
        self.k_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (batch, heads, T, head_dim), k and v repeated; gate (batch, T, heads * head_dim)."""
        c, (batch, length, _) = self.c, x.shape
        q, gate = self.q_proj(x).view(batch, length, c.num_attention_heads, 2 * c.head_dim).chunk(2, dim=-1)
        k = self.k_proj(x).view(batch, length, c.num_key_value_heads, c.head_dim)
        v = self.v_proj(x).view(batch, length, c.num_key_value_heads, c.head_dim)
        where = (torch.arange(length), int(c.head_dim * c.partial_rotary_factor), c.rope_theta)
        q = rotate(self.q_norm(q).transpose(1, 2), *where)
        k = rotate(self.k_norm(k).transpose(1, 2), *where)
        groups = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.transpose(1, 2).repeat_interleave(groups, 1)
        return q, k, v, gate.reshape(batch, length, -1)

    def output(self, attended: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(2) * torch.sigmoid(gate))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.project(x)
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


def invert_unit_lower(a: Tensor, base: int = 16) -> Tensor:
    """(I + A)^-1 for strictly lower triangular A (..., n, n), n a power of two times `base`.

    Blocks of `base` by the product (I + N)(I + N^2)(I + N^4)..., N = -A, which ends as N is nilpotent. In
    larger blocks the powers grow and cost digits, so these are put together: the lower left of the inverse
    of [[P, 0], [C, Q]] is -Q^-1 C P^-1.
    """
    n = a.shape[-1]
    if n > base:
        h = n // 2
        halves = invert_unit_lower(torch.stack((a[..., :h, :h], a[..., h:, h:])), base)
        corner = -halves[1] @ a[..., h:, :h] @ halves[0]
        top = torch.cat((halves[0], torch.zeros_like(corner)), -1)
        return torch.cat((top, torch.cat((corner, halves[1]), -1)), -2)
    power, inverse = -a, torch.eye(n, dtype=a.dtype) - a
    for _ in range(base.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A (..., n, n)."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        inverse = invert_unit_lower(a)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """The gated delta rule from an empty state, by chunks of tokens (Yang et al. 2024, arXiv:2412.06464).

    q, k (batch, heads, T, d_k), v (batch, heads, T, d_v), g (log decay) and beta (batch, heads, T), all F32;
    T a multiple of `chunk`. Within a chunk the updates, each of which needs those before it, are one
    triangular inverse; between chunks a state (batch, heads, d_k, d_v) is carried.
    """
    batch, heads, length, d_k = q.shape
    split = (batch, heads, length // chunk, chunk)
    q, k, v = (x.reshape(*split, -1) for x in (q, k, v))
    g, beta = g.reshape(split).cumsum(-1), beta.reshape(split)[..., None]
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    k_beta = k * beta
    inverse = UnitLowerInverse.apply((k_beta @ k.transpose(-1, -2) * decay).tril(-1))
    value = inverse @ (v * beta)
    k_state = inverse @ (k_beta * g.exp()[..., None])
    within = q @ k.transpose(-1, -2) * decay
    q_state = q * g.exp()[..., None]
    k_last = (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2)
    g_last = g[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, d_k, v.shape[-1], dtype=v.dtype)
    out = []
    for i in range(length // chunk):
        new = value[:, :, i] - k_state[:, :, i] @ state
        out.append(q_state[:, :, i] @ state + within[:, :, i] @ new)
        state = state * g_last[:, :, i] + k_last[:, :, i] @ new
    return torch.stack(out, 2).reshape(batch, heads, length, -1)


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    """Linear attention: a short causal convolution, then the gated delta rule, then a gated norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.k_size = c.linear_num_key_heads * c.linear_key_head_dim
        self.v_size = c.linear_num_value_heads * c.linear_value_head_dim
        channels = 2 * self.k_size + self.v_size
        self.in_proj_qkv = nn.Linear(c.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, self.v_size, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, c.linear_num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, c.linear_num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, c.linear_conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(c.linear_num_value_heads))
        self.A_log = nn.Parameter(torch.zeros(c.linear_num_value_heads))
        self.norm = GatedRMSNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = nn.Linear(self.v_size, c.hidden_size, bias=False)

    def convolve(self, x: Tensor) -> Tensor:
        """Causal depthwise convolution over T of x (batch, T, channels), then silu."""
        weight = self.conv1d.weight[:, 0].t()  # (taps, channels)
        taps, length = weight.shape[0], x.shape[1]
        padded = F.pad(x.float(), (0, 0, taps - 1, 0))
        return F.silu(sum(padded[:, i : i + length] * weight[i] for i in range(taps)))

    def forward(self, x: Tensor) -> Tensor:
        c, (batch, length, _) = self.c, x.shape
        x = F.pad(x, (0, 0, 0, -length % CHUNK))
        qkv = self.convolve(self.in_proj_qkv(x))
        q, k, v = (
            part.view(batch, x.shape[1], -1, size).transpose(1, 2)
            for part, size in zip(
                qkv.split((self.k_size, self.k_size, self.v_size), dim=-1),
                (c.linear_key_head_dim, c.linear_key_head_dim, c.linear_value_head_dim),
                strict=True,
            )
        )
        repeat = c.linear_num_value_heads // c.linear_num_key_heads
        q = l2norm(q).repeat_interleave(repeat, 1) * c.linear_key_head_dim**-0.5
        k = l2norm(k).repeat_interleave(repeat, 1)
        beta = torch.sigmoid(self.in_proj_b(x).float()).transpose(1, 2)
        g = (-self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):
            y = gated_delta_rule(q, k, v, g, beta)
        z = self.in_proj_z(x).view(batch, x.shape[1], -1, c.linear_value_head_dim)
        return self.out_proj(self.norm(y.transpose(1, 2), z).flatten(2)[:, :length])


class Layer(nn.Module):
    def __init__(self, c: Config, kind: str) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        mix = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        x = x + mix(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layer_types)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def layer_inputs(self, x: Tensor) -> list[Tensor]:
        """What enters each layer and, last, the hidden row after the final norm: one more than there are layers."""
        inputs = [x]
        for layer in self.layers:
            inputs.append(layer(inputs[-1]))
        return [*inputs[:-1], self.norm(inputs[-1])]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_inputs(x)[-1]


def shift(x: Tensor, dim: int = 1) -> Tensor:
    """Moves rows one position later along `dim`; the first becomes zeros."""
    first = torch.zeros_like(x.narrow(dim, 0, 1))
    return torch.cat((first, x.narrow(dim, 0, x.shape[dim] - 1)), dim)


def attend(q: Tensor, cells: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of depth d = len(cells): depth 1 cells up to i - d + 1, then one of each later depth."""
    k, v = cells[0]
    if len(cells) == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    depth, length, scale = len(cells), q.shape[2], q.shape[3] ** -0.5
    scores = q @ k.transpose(-1, -2)
    # the first rows of a deeper pass see no cell of depth 1; their own cell keeps them finite
    visible = torch.ones(length, length, dtype=torch.bool).tril(1 - depth)
    scores = scores.float().masked_fill(~visible, -1e9)
    own = []
    for d in range(1, depth):
        k_d, v_d = cells[d]
        for _ in range(depth - 1 - d):
            k_d, v_d = shift(k_d, 2), shift(v_d, 2)
        scores = torch.cat((scores, (q * k_d).float().sum(-1, keepdim=True)), -1)
        own.append(v_d)
    p = (scores * scale).softmax(-1).to(v.dtype)
    out = p[..., :length] @ v
    for d, v_d in enumerate(own):
        out = out + p[..., length + d, None] * v_d
    return out


class MTP(nn.Module):
    """One full-attention block over [norm(embedding) ; norm(hidden row one position back)]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, embedding: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Hidden rows (batch, T, hidden) of depths 1..depth; at depth d the first d - 1 mean nothing."""
        layer, rows = self.layers[0], []
        embedding = self.pre_fc_norm_embedding(embedding)
        cells: list[tuple[Tensor, Tensor]] = []
        for _ in range(depth):
            u = self.fc(torch.cat((embedding, self.pre_fc_norm_hidden(shift(hidden))), dim=-1))
            q, k, v, gate = layer.self_attn.project(layer.input_layernorm(u))
            cells.append((k, v))
            x = u + layer.self_attn.output(attend(q, cells), gate)
            hidden = self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
            rows.append(hidden)
        return rows


class DemoModel(nn.Module):
    """Trunk and head; parameters are named as in a checkpoint, the output matrix is the embedding."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.model = Trunk(c)
        self.mtp = MTP(c)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * self.c.num_hidden_layers) ** 0.5 if residual else 0.02)
            elif p.dim() == 3:
                nn.init.normal_(p, std=0.3)
            elif name.endswith("A_log"):
                p.uniform_(1.0, 16.0).log_()
            elif name.endswith("dt_bias"):  # steps between 0.001 and 0.1, seen through softplus
                step = torch.empty_like(p).uniform_(-6.9, -2.3).exp()
                p.copy_(step + torch.log(-torch.expm1(-step)))

    def hidden(self, tokens: Tensor, depth: int) -> list[Tensor]:
        """Rows (batch, T, hidden) that predict token i + 1 at i: trunk, then head at depths 1..depth."""
        embedding = self.model.embed_tokens(tokens)
        trunk = self.model(embedding)
        return [trunk, *self.mtp(embedding, trunk, depth)] if depth else [trunk]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, depth: int = 0) -> list[Tensor]:
        """Logits (batch, T, vocab) of the trunk, then of the head at depths 1..depth."""
        return [self.logits(h) for h in self.hidden(tokens, depth)]
