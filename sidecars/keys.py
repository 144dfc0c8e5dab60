"""Names that are published in files and can therefore never change: GGUF keys and tensor names.

`{arch}` stands for the value of `general.architecture`, `{i}` for a block's index. Keys that start with `sidecar.` are
ours; llama.cpp ignores keys it does not know. This module knows no values.
"""

from __future__ import annotations

import re

ARCHITECTURE = "general.architecture"
TYPE = "general.type"
NAME = "general.name"
SIZE_LABEL = "general.size_label"
FILE_TYPE = "general.file_type"
QUANTIZATION_VERSION = "general.quantization_version"
ALIGNMENT = "general.alignment"

BLOCK_COUNT = "{arch}.block_count"
EMBEDDING_LENGTH = "{arch}.embedding_length"
EMBEDDING_LENGTH_OUT = "{arch}.embedding_length_out"
NEXTN_PREDICT_LAYERS = "{arch}.nextn_predict_layers"
TARGET_LAYERS = "{arch}.target_layers"
TARGET_HIDDEN_SIZE = "{arch}.target_hidden_size"
NORM_BEFORE_RESIDUAL = "{arch}.norm_before_residual"
NORM_BEFORE_FC = "{arch}.norm_before_fc"
BLOCK_SIZE = "{arch}.block_size"
SAMPLE_FROM_ANCHOR = "{arch}.sample_from_anchor"
HAS_CONFIDENCE_HEAD = "{arch}.has_confidence_head"
CONV_KERNEL_SIZE = "{arch}.conv_kernel_size"
CONV_GROUP_SIZE = "{arch}.conv_group_size"
SELECTOR_RANK = "{arch}.selector_rank"
SELECTOR_TOP_K = "{arch}.selector_top_k"
KEY_LENGTH = "{arch}.attention.key_length"
VALUE_LENGTH = "{arch}.attention.value_length"
EPSILONS = ("{arch}.attention.layer_norm_rms_epsilon", "{arch}.attention.layer_norm_epsilon")

VOCAB_SIZE = "{arch}.vocab_size"
TOKENIZER_MODEL = "tokenizer.ggml.model"
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
MASK_TOKEN_ID = "tokenizer.ggml.mask_token_id"

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS_COUNT = "split.tensors.count"

FORMAT = "sidecar.format"
FORMAT_VERSION = 1
FINGERPRINT_TRUNK = "sidecar.fingerprint.trunk"
FINGERPRINT_ROWS = "sidecar.fingerprint.rows"
MERGED_TRUNK = "sidecar.merged.trunk"  # in a main file, of the head inside it
MERGED_ROWS = "sidecar.merged.rows"
GRAFT_TRUNK = "sidecar.graft.trunk"
REQUANT_FROM = "sidecar.requant.from"
MTP_FROM = "sidecar.mtp.from"  # the checkpoint that a head was taken from, where it is not the main file's
OF_HEAD = (GRAFT_TRUNK, REQUANT_FROM, MTP_FROM)  # what became of a head, in whichever file it is
COMPACT_TARGET_IDS = "sidecar.compact.target_ids"
COMPACT_N_VOCAB = "sidecar.compact.n_vocab"
COMPACT_SOURCE = "sidecar.compact.source"

# Ends of the names of matrices that stay F32 whatever type is asked for, in llama.cpp's files and ours.
ALWAYS_F32 = (
    "_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".ssm_conv1d.weight", ".indexer.proj.weight",
    ".ssm_conv1d_q.weight", ".ssm_conv1d_k.weight", ".ssm_conv1d_v.weight",
    "_hc_fn.weight", ".hc_attn_fn.weight", ".hc_ffn_fn.weight", "_compressor_ape.weight", ".ffn_gate_tid2eid.weight",
)  # fmt: skip

TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"
ENC_OUTPUT_NORM = "enc.output_norm.weight"
FC = "fc.weight"  # the main model's layer inputs -> the drafter's width
D2T = "d2t"  # (n_draft_vocab,) the main model's token id of each row of a drafter's own output
FIRST_ATTN_NORM = "blk.0.attn_norm.weight"
NEXTN_SHARED_TARGET_TENSORS = (
    "nextn_shared_target_tensors"  # a foreign writer's: the head holds no matrices of the vocabulary
)
NEXTN_EH_PROJ = "blk.{i}.nextn.eh_proj.weight"
NEXTN_ENORM = "blk.{i}.nextn.enorm.weight"
NEXTN_HNORM = "blk.{i}.nextn.hnorm.weight"
NEXTN_EMBED_TOKENS = "blk.{i}.nextn.embed_tokens.weight"
NEXTN_SHARED_HEAD_HEAD = "blk.{i}.nextn.shared_head_head.weight"

_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.(.+)")


def block_of(name: str) -> tuple[int, str] | None:
    """The number of a tensor's block and the tensor's name in it; None for one that is of no block.

    >>> block_of("blk.3.attn_q.weight"), block_of("output.weight")
    ((3, 'attn_q.weight'), None)
    """
    found = _BLOCK.fullmatch(name)
    return (int(found[1]), found[2]) if found else None
