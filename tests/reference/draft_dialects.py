"""Random drafts in the layouts of formats.md 1.5, 2.2, 2.8 and 2.9: names, shapes, dtypes and nesting as published.

A draft starts in the layout of section 2.1 or 1.1; the `as_` functions convert it to others."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .draft_models import in_half, make_eagle
from .llama import embedding_weight
from .models import Checkpoint, Draws, draft_config, load_checkpoint, save_checkpoint

State = dict[str, Tensor]
LAYER = "midlayer."
AUX = "eagle_aux_hidden_state_layer_ids"
OUTER = ("hidden_size", "draft_vocab_size", "norm_before_residual", "target_hidden_size", AUX, "norm_output")
OUTER += ("norm_before_fc", "fc_norm", "embed_requires_grad")
"""Fields that speculators keep outside of transformer_layer_config, if a draft has them."""


def save(path: Path, checkpoint: Checkpoint, safetensors: bool = True) -> Path:
    state, config = checkpoint
    return save_checkpoint(path, in_half(state), config, safetensors)


def eagle(path: Path, target: Path, **options: Any) -> Checkpoint:
    """Section 1.1, with whatever make_eagle takes."""
    return load_checkpoint(make_eagle(path / "plain", target, **options))


def eagle3(
    target: Path,
    *,
    draft_vocab: int | None = 24,
    hidden: int | None = None,
    states: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    inner: int = 40,
    seed: int = 1,
    **fields: Any,
) -> Checkpoint:
    """Section 2.1; `fields` go to the config. With `draft_vocab` None there is neither d2t nor t2d."""
    _, target_config = load_checkpoint(target)
    width, vocab = target_config["hidden_size"], target_config["vocab_size"]
    hidden, draws, std = hidden or width, Draws(seed), 0.2
    ids = sorted(torch.randperm(vocab, generator=draws.generator)[: draft_vocab or vocab].tolist())
    shapes = {
        "self_attn.q_proj": (heads * head_dim, 2 * hidden),
        "self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    state = {f"{LAYER}{name}.weight": draws.matrix(*shape, std) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        state[f"{LAYER}{name}.weight"] = draws.norm(hidden)
    state["fc.weight"] = draws.matrix(hidden, states * width, std)
    state["norm.weight"] = draws.norm(hidden)
    state["lm_head.weight"] = draws.matrix(len(ids), hidden, 2 * std)
    config = draft_config(target_config, inner, heads, kv_heads) | {"hidden_size": hidden}
    if draft_vocab is not None:
        state["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
    return state, config | {"draft_vocab_size": len(ids)} | fields


def with_embedding(checkpoint: Checkpoint, target: Path) -> Checkpoint:
    """An embedding that is not the target's."""
    state, config = checkpoint
    rows = embedding_weight(load_checkpoint(target)[0]).shape[0]
    state["embed_tokens.weight"] = Draws(11).matrix(rows, config["hidden_size"], 0.3)
    return state, config


def without(checkpoint: Checkpoint, *names: str) -> Checkpoint:
    state, config = checkpoint
    kept = {key: tensor for key, tensor in state.items() if key not in names}
    return kept, {key: value for key, value in config.items() if key not in names}


def with_biases(checkpoint: Checkpoint) -> Checkpoint:
    """On every projection of the layer."""
    state, config = checkpoint
    draws = Draws(12)
    names = [key for key in state if key.startswith(LAYER) and "_proj" in key]
    biases = {k.replace("weight", "bias"): draws.matrix(1, state[k].shape[0], 0.2)[0] for k in names}
    return state | biases, config | {"attention_bias": True, "mlp_bias": True}


def with_norms(checkpoint: Checkpoint, sizes: dict[str, int]) -> Checkpoint:
    state, config = checkpoint
    draws = Draws(13)
    return state | {f"{name}.weight": draws.norm(size) for name, size in sizes.items()}, config


def renamed(checkpoint: Checkpoint, names: dict[str, str]) -> Checkpoint:
    """By prefix."""
    state, config = checkpoint
    found = {}
    for key, tensor in state.items():
        old = next((prefix for prefix in names if key.startswith(prefix)), "")
        found[names.get(old, "") + key.removeprefix(old)] = tensor
    return found, config


def as_automodel(checkpoint: Checkpoint) -> Checkpoint:
    """NVIDIA NeMo: everything but the head and the maps below `model.`."""
    state, config = renamed(
        checkpoint, {LAYER: "model.layers.0.", "fc.": "model.fc.", "norm.": "model.norm."}
    )
    return state, config


def as_speculators(checkpoint: Checkpoint, layer_type: str = "llama") -> Checkpoint:
    state, config = renamed(checkpoint, {LAYER: "layers.0."})
    inner = {k: v for k, v in config.items() if k not in OUTER or k == "hidden_size"}
    inner |= {"model_type": layer_type, "architectures": None}
    outer = {k: v for k, v in config.items() if k in OUTER and k != "hidden_size"}
    return state, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "speculators_config": speculators_config("eagle3"),
        "torch_dtype": "float32",
        "transformer_layer_config": inner,
        **outer,
    }


def speculators_config(algorithm: str) -> dict[str, Any]:
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    }


def as_old_speculators(checkpoint: Checkpoint, layernorms: bool) -> Checkpoint:
    """Section 1.5: neither embedding nor head; with `layernorms` the three of HASS."""
    state, config = renamed(checkpoint, {"layers.0.": "transformer.", "fc.": "fusion_fc."})
    del state["embed_tokens.weight"]
    if layernorms:
        names = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
        state, _ = with_norms((state, config), dict.fromkeys(names, config["hidden_size"]))
    return state, {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_config": speculators_config("eagle"),
        "fusion_bias": "fusion_fc.bias" in state,
        "layernorms": layernorms,
        "transformer_layer_config": config,
    }


def as_old_vllm(checkpoint: Checkpoint) -> Checkpoint:
    """Section 1.5: a nested config; HASS's norms of both halves; an input_layernorm that is not applied."""
    state, config = renamed(checkpoint, {"layers.0.": "model.layers.0.", "embed_": "model.embed_"})
    size = config["hidden_size"]
    names = ("embedding_layernorm", "hidden_states_layernorm", "model.layers.0.input_layernorm")
    state, _ = with_norms((state, config), dict.fromkeys(names, size))
    inner = config | {"add_para_norm": True}
    outer = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": inner}
    return state, outer | {"truncated_vocab_size": config["vocab_size"]}
