"""Write trained drafts in the published file formats, which this server and others load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from specserve.models.checkpoint import file_tensors
from specserve.models.config import ModelConfig
from specserve.models.draft.base import DraftConfig
from specserve.models.draft.block import BlockConfig
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.draft.medusa import MedusaHeads
from specserve.models.draft.mlp_speculator import SpeculatorConfig
from specserve.models.llama import LlamaModel
from specserve.tools.output import replacing
from specserve.tools.train.vocab import membership, offsets

FORMATS = ("safetensors", "bin")
OUTER = ("fc.", "norm.", "lm_head.")  # tensors that do not belong to the decoder layer


def eagle_tensors(draft: EagleHead, target: LlamaModel) -> dict[str, Tensor]:
    """Return EAGLE's tensors: ``fc``, ``layers.0`` without an input norm, and a copy of the target's embedding."""
    tensors = {_inside(name, "layers.0."): tensor for name, tensor in file_tensors(draft).items()}
    return {"embed_tokens.weight": target.embed_tokens.weight.detach(), **tensors}


def eagle3_tensors(draft: Eagle3Head, draft_ids: Tensor) -> dict[str, Tensor]:
    """Return EAGLE-3's tensors: ``fc``, ``midlayer``, ``norm``, ``lm_head``, the offsets ``d2t`` and the mask
    ``t2d``."""
    tensors = {_inside(name, "midlayer."): tensor for name, tensor in file_tensors(draft).items()}
    tensors["d2t"] = offsets(draft_ids)
    tensors["t2d"] = membership(draft_ids, draft.config.target_vocab_size)
    return tensors


def _inside(name: str, prefix: str) -> str:
    return name if name.startswith(OUTER) else prefix + name


def _common_config(
    config: DraftConfig | BlockConfig, target: ModelConfig, dtype: torch.dtype
) -> dict[str, Any]:
    layer = config.layer
    return {
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "bias": isinstance(config, DraftConfig) and config.fc_bias,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def eagle_config(config: DraftConfig, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLMEagle"], **_common_config(config, target, dtype)}


def eagle3_config(config: DraftConfig, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return EAGLE-3's config. Aux layer ids are boundaries: k is the input of layer k. They appear twice: SGLang reads
    them in ``eagle_config``, vLLM at the top, where it would otherwise take a default and accept next to nothing."""
    taps = list(config.taps)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_common_config(config, target, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": taps,
        },
        "eagle_aux_hidden_state_layer_ids": taps,
    }


def block_config(config: BlockConfig, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return z-lab's config for DFlash, or SpecForge's for DSpark, which adds fields of the heads."""
    dspark = {
        "projector_type": "dspark",
        "markov_rank": config.rank,
        "markov_head_type": config.correction,
        "enable_confidence_head": True,
        "confidence_head_with_markov": config.confidence > config.layer.hidden_size,
    }
    return {
        **_common_config(config, target, dtype),
        "architectures": ["DSparkDraftModel" if config.correction else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_id,
            "target_layer_ids": [tap - 1 for tap in config.taps],
            "block_size": config.block_size,
            **(dspark if config.correction else {}),
        },
    }


def mlp_speculator_config(config: SpeculatorConfig, target: ModelConfig) -> dict[str, Any]:
    """Return the configuration under IBM's names."""
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": target.vocab_size,
        "emb_dim": target.hidden_size,
        "inner_dim": config.inner,
        "n_predict": config.levels,
        "tie_weights": config.tied,
        "scale_input": config.scale_input,
        "n_candidates": 1,
        "top_k_tokens_per_head": [1] * config.levels,
    }


def write_medusa(draft: MedusaHeads, model: Path, path: Path, dtype: torch.dtype, form: str) -> None:
    """Write the authors' files, in which head i has its blocks and then, under the number of blocks, its scorer."""
    blocks = len(draft.heads[0])  # type: ignore[arg-type]
    tensors = {}
    for name, tensor in file_tensors(draft).items():
        kind, i, rest = name.split(".", 2)
        tensors[f"{i}.{rest}" if kind == "heads" else f"{i}.{blocks}.{rest}"] = tensor
    config = {
        "base_model_name_or_path": str(model),
        "medusa_num_heads": len(draft.heads),
        "medusa_num_layers": blocks,
    }
    write(tensors, config, path, dtype, form, "medusa_lm_head.safetensors", "medusa_lm_head.pt")


def write(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    path: Path,
    dtype: torch.dtype,
    form: str,
    safetensors: str = "model.safetensors",
    pickled: str = "pytorch_model.bin",
) -> None:
    """Write ``config.json`` and the weights, floating-point tensors in ``dtype``, others unchanged."""
    path.mkdir(parents=True, exist_ok=True)
    ready = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }
    name = pickled if form == "bin" else safetensors
    with replacing("--output", path / name) as to, to.open("wb") as file:
        if form == "bin":
            torch.save(ready, file)
        else:
            file.write(save(ready, metadata={"format": "pt"}))
    with replacing("--output", path / "config.json") as to:
        to.write_text(json.dumps(config, indent=2) + "\n")
