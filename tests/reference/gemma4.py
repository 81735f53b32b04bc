"""Random tiny Gemma 4 targets and assistants, made and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": 9, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SMALL = {  # E2B and E4B
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}  # fmt: skip
LARGE = {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 8.0}  # 31B


def make_gemma4(
    path: Path, *, family: str = "Gemma4", branch_scale: float = 1.0, seed: int = 1, **fields: Any
) -> Path:
    """``branch_scale`` as in ``make_llama``."""
    config = getattr(transformers, f"{family}TextConfig")(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw_weights(model, branch_scale, seed)
    model.save_pretrained(path)
    return path


@torch.no_grad()
def draw_weights(model: nn.Module, branch_scale: float = 1.0, seed: int = 1) -> None:
    """Norms around 1, of the branches around ``branch_scale``."""
    draws = torch.Generator().manual_seed(seed)
    scalars = [(name, each) for name, each in model.named_buffers() if name.endswith("layer_scalar")]
    for name, weight in [*model.named_parameters(), *scalars]:
        noise = 0.2 * torch.randn(weight.shape, generator=draws)
        around_one = "norm" in name or "scalar" in name
        scale = branch_scale if ".post_" in name else 1
        weight.copy_(scale * (1 + noise) if around_one else noise)
