"""Draft heads of other kinds for the demo model, in PyTorch, for training on a CPU: EAGLE3, DFlash and DSpark.

Parameter names and `settings` are those of published checkpoints, so that converter/drafts/ takes them as they are. Embeddings and
output are the target's. A head's guesses are asked for at anchors: an anchor is the position of the newest known token, of which the
target has not computed a row yet. From the tokens up to the anchor and the target's layer inputs before it, a head guesses the tokens
at anchor + 1, anchor + 2, ...; where a guess depends on guesses before it, it is given the text's tokens in their place, for a guess
counts only if all before it were right. Knows nothing of files or training.

Papers: EAGLE-3 (arXiv:2503.01840), DFlash (arXiv:2602.06036); DSpark's form is that of converter/drafts/dspark.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from demo_model import MLP, Config, DemoModel, attend, rotate, shift
from torch import Tensor, nn

THETA = 10000.0
MASK = Config.vocab_size - 2  # <|im_start|>, which no text is continued with


class Norm(nn.RMSNorm):
    """RMS norm in F32; its weight is stored as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


class DraftAttention(nn.Module):
    """Grouped-query attention over rows of `n_in` values, without a gate; q and k are normed if `has_norms`."""

    def __init__(self, c: Config, n_in: int, has_norms: bool) -> None:
        super().__init__()
        self.c = c
        q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(n_in, q_size, bias=False)
        self.k_proj = nn.Linear(n_in, kv_size, bias=False)
        self.v_proj = nn.Linear(n_in, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps) if has_norms else None
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps) if has_norms else None

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """(batch, heads, *positions.shape, head_dim) of x (batch, *positions.shape, n_in)."""
        return self.heads(self.q_proj(x), self.q_norm, positions)

    def cells(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of x, repeated to as many heads as the queries have."""
        groups = self.c.num_attention_heads // self.c.num_key_value_heads
        k = self.heads(self.k_proj(x), self.k_norm, positions)
        v = self.heads(self.v_proj(x), None, None)
        return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def heads(self, x: Tensor, norm: nn.Module | None, positions: Tensor | None) -> Tensor:
        x = x.unflatten(-1, (-1, self.c.head_dim))
        x = (norm(x) if norm else x).movedim(-2, 1)
        return x if positions is None else rotate(x, positions, self.c.head_dim, THETA)

    def output(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.movedim(1, -2).flatten(-2))


class Head(nn.Module):
    """What the heads have in common. Of the target's layers `target_layers` the inputs are read; that of 4, which there is not, is
    the hidden row after the final norm."""

    kind: ClassVar[str]
    target_layers: ClassVar[tuple[int, ...]]
    n_drafts: ClassVar[int]  # guesses from one anchor
    n_shortest: ClassVar[int]  # the fewest it is trained for
    n_anchors: ClassVar[int]  # of a row, in a training step

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c

    @torch.no_grad()
    def initialise(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(self, target: DemoModel, tokens: Tensor, inputs: Tensor, anchors: Tensor, n: int) -> Tensor:
        """Hidden rows (batch, A, n, hidden), of which the target's output makes the guesses of n tokens after each anchor.

        `tokens` (batch, T); `inputs` (batch, T, len(target_layers) * hidden) are the target's layer inputs side by side; anchors (A).
        """
        raise NotImplementedError

    def logits(
        self, target: DemoModel, tokens: Tensor, inputs: Tensor, anchors: Tensor, n: int
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (batch, A, n, vocab), and (batch, A, n) of the confidence that the guess is right, where the head has one."""
        return target.logits(self(target, tokens, inputs, anchors, n)), None

    def settings(self) -> dict[str, Any]:
        """The config.json."""
        c = self.c
        return {
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_hidden_layers,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": THETA,
            "max_position_embeddings": c.max_position_embeddings,
            "dtype": "bfloat16",
        }


class Eagle3Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn = DraftAttention(c, 2 * c.hidden_size, has_norms=False)
        self.mlp = MLP(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)


class Eagle3(Head):
    """One block over [norm(embedding of the token one on) ; norm(g)], g made of three layer inputs or, when drafting, its own row."""

    kind, target_layers = "eagle3", (1, 3, 4)
    n_drafts, n_shortest, n_anchors = 3, 3, 96

    def __init__(self) -> None:
        super().__init__(Config(num_hidden_layers=1, intermediate_size=512))
        c, width = self.c, len(self.target_layers) * self.c.hidden_size
        self.input_norm = Norm(width, c.rms_norm_eps)
        self.fc = nn.Linear(width, c.hidden_size, bias=False)
        self.midlayer = Eagle3Block(c)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.initialise()
        with torch.no_grad():  # the hidden row's values are that much smaller than those between layers
            self.input_norm.weight[-c.hidden_size :] = 8.0

    def forward(self, target: DemoModel, tokens: Tensor, inputs: Tensor, anchors: Tensor, n: int) -> Tensor:
        """Row c of a pass is the cell of (token c + 1, g or own row c) and guesses token c + 2: see `attend` for the passes."""
        block, positions, rows = self.midlayer, torch.arange(tokens.shape[1] - 1), []
        embedding = block.input_layernorm(target.model.embed_tokens(tokens[:, 1:]))
        hidden, cells = self.fc(self.input_norm(inputs[:, :-1])), []
        for i in range(n):
            x = torch.cat((embedding, block.hidden_norm(hidden)), -1)
            cells.append(block.self_attn.cells(x, positions))
            x = hidden + block.self_attn.output(attend(block.self_attn.queries(x, positions), cells))
            x = x + block.mlp(block.post_attention_layernorm(x))
            rows.append(self.norm(x[:, anchors - 1 + i]))
            hidden = shift(x)
        return torch.stack(rows, 2)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "eagle_aux_hidden_state_layer_ids": list(self.target_layers),
            "norm_before_fc": True,
        }


class DFlashBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn = DraftAttention(c, c.hidden_size, has_norms=True)
        self.mlp = MLP(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """x (batch, A, n, hidden) from each anchor on sees the context (batch, T, hidden) before the anchor, and itself."""
        positions = anchors[:, None] + torch.arange(x.shape[2])
        normed, before = self.input_layernorm(x), torch.arange(context.shape[1])
        q = self.self_attn.queries(normed, positions)
        k_own, v_own = self.self_attn.cells(normed, positions)
        k, v = self.self_attn.cells(context, before)
        seen = (q.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, positions.shape)
        seen = seen.float().masked_fill((before >= anchors[:, None])[:, None], -torch.inf)
        scores = torch.cat((seen, (q @ k_own.transpose(-1, -2)).float()), -1)
        p = (scores * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
        out = (p[..., : len(before)].flatten(2, 3) @ v).unflatten(2, positions.shape)
        x = x + self.self_attn.output(out + p[..., len(before) :] @ v_own)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(Head):
    """Blocks that fill [anchor's token, mask, mask, ...] in one pass, over keys and values made of the target's layer inputs."""

    kind, target_layers = "dflash", (1, 3)
    n_drafts, n_shortest, n_anchors = 7, 1, 48
    first = 1  # row of the block that guesses the first token

    def __init__(self) -> None:
        super().__init__(Config(num_hidden_layers=2, intermediate_size=384))
        c = self.c
        self.fc = nn.Linear(len(self.target_layers) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashBlock(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.initialise()

    def forward(self, target: DemoModel, tokens: Tensor, inputs: Tensor, anchors: Tensor, n: int) -> Tensor:
        block = tokens.new_full((len(tokens), len(anchors), n + self.first), MASK)
        block[:, :, 0] = tokens[:, anchors]
        x, context = target.model.embed_tokens(block), self.hidden_norm(self.fc(inputs))
        for layer in self.layers:
            x = layer(x, context, anchors)
        return self.norm(x[:, :, self.first :])

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.n_drafts + self.first,
            "dflash_config": {
                "mask_token_id": MASK,
                "target_layer_ids": [layer - 1 for layer in self.target_layers],  # by their outputs
            },
        }


class MarkovHead(nn.Module):
    def __init__(self, n_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(n_vocab, rank)
        self.markov_w2 = nn.Linear(rank, n_vocab, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.proj = nn.Linear(n_in, 1)


class DSpark(DFlash):
    """DFlash of which the anchor's row guesses too, with a bias from each token to the next, and a confidence in each guess."""

    kind, first, rank = "dspark", 0, 32

    def __init__(self) -> None:
        super().__init__()
        self.markov_head = MarkovHead(self.c.vocab_size, self.rank)
        self.confidence_head = ConfidenceHead(self.c.hidden_size + self.rank)
        self.initialise()

    def logits(
        self, target: DemoModel, tokens: Tensor, inputs: Tensor, anchors: Tensor, n: int
    ) -> tuple[Tensor, Tensor | None]:
        rows = self(target, tokens, inputs, anchors, n)
        before = self.markov_head.markov_w1(tokens[:, anchors[:, None] + torch.arange(n)])
        known = torch.cat((rows, before), -1).detach()  # the confidence judges, and changes nothing
        return target.logits(rows) + self.markov_head.markov_w2(before), self.confidence_head.proj(known)[
            ..., 0
        ]

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"architectures": ["Qwen3DSparkModel"], "markov_rank": self.rank}


HEADS: dict[str, type[Head]] = {head.kind: head for head in (Eagle3, DFlash, DSpark)}
