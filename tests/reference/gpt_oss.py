"""Random gpt-oss checkpoints, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.reference.gemma4 import make_drawn

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9,
    "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def make_gpt_oss(path: Path, branch_scale: float = 0.1, **fields: Any) -> Path:
    return make_drawn(path, "GptOss", branch_scale, **{**SIZES, **fields})
