"""Random EAGLE and EAGLE-3 drafts for a target on disk, in their published layouts (formats.md 1.1, 2.1).

With `agree` a draft is constructed, not drawn, to return head(norm(E[x])) of the newest token x. It then often agrees
with a target made with a small `branch_scale` and an untied head, so that tests see long accepted paths. Such a draft
hardly reads its features and cache: to test those, compare with eagle.py or use a random draft."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .llama import embedding_weight, head_weight
from .models import Draws, draft_config, load_checkpoint, save_checkpoint

LITTLE = 0.02  # std of what an agreeing draft leaves to chance
FOCUS = 4.0  # scale of the queries and keys that make an agreeing EAGLE-3 draft attend to its own row


def in_half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in state.items()}


def make_eagle(
    path: Path,
    target: Path,
    *,
    inner: int = 40,
    heads: int | None = None,
    kv_heads: int | None = None,
    fc_bias: bool = False,
    qkv_bias: bool = False,
    rope_theta: float | None = None,
    architecture: str = "LlamaForCausalLM",
    agree: bool = False,
    safetensors: bool = False,
    seed: int = 1,
    std: float = 0.2,
) -> Path:
    """EAGLE-1/2, float16. The config omits `bias` when fc has one, as the published files do."""
    target_state, target_config = load_checkpoint(target)
    hidden = target_config["hidden_size"]
    heads = heads or target_config["num_attention_heads"]
    kv_heads = kv_heads or target_config["num_key_value_heads"]
    draws = Draws(seed)
    layer = draws.layer(hidden, hidden, inner, heads, kv_heads, std)
    fc = draws.matrix(hidden, 2 * hidden, std)
    embed = embedding_weight(target_state).float()
    if agree:
        for key in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            layer[key] = draws.like(layer[key], LITTLE)
        fc = draws.matrix(hidden, 2 * hidden, LITTLE)
        fc[:, :hidden] += torch.diag(target_state["model.norm.weight"].float() / root_mean_square(embed))
    state = {"embed_tokens.weight": embed, "fc.weight": fc, **{f"layers.0.{k}": v for k, v in layer.items()}}
    if fc_bias:
        state["fc.bias"] = draws.matrix(1, hidden, LITTLE if agree else std)[0]
    config = draft_config(target_config, inner, heads, kv_heads) | {"architectures": [architecture]}
    config |= {} if fc_bias else {"bias": False}
    config |= {} if rope_theta is None else {"rope_theta": rope_theta}
    if qkv_bias:
        config["qkv_bias"] = True
        for name in "qkv":
            rows = state[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
            state[f"layers.0.self_attn.{name}_proj.bias"] = draws.matrix(1, rows, std)[0]
    return save_checkpoint(path, in_half(state), config, safetensors)


def make_eagle3(
    path: Path,
    target: Path,
    *,
    draft_vocab: int | None = None,
    inner: int = 40,
    heads: int | None = None,
    kv_heads: int | None = None,
    aux_layers: Sequence[int] | None = None,
    rope_theta: float | None = None,
    norm_before_residual: bool = False,
    own_head: bool = True,
    layer_prefix: str = "midlayer.",
    architecture: str = "LlamaForCausalLM",
    agree: bool = False,
    safetensors: bool = False,
    seed: int = 1,
    std: float = 0.2,
) -> Path:
    """EAGLE-3, float16 + int64 + bool. `draft_vocab` None: the whole vocabulary, and neither d2t nor t2d.
    Targets of fewer than 7 layers have no default aux layers: unless `aux_layers` is given, [0, N/2, N] is
    written. An agreeing draft has as many kv heads as heads."""
    target_state, target_config = load_checkpoint(target)
    hidden, vocab = target_config["hidden_size"], target_config["vocab_size"]
    heads = heads or target_config["num_attention_heads"]
    kv_heads = heads if agree else kv_heads or target_config["num_key_value_heads"]
    assert own_head or draft_vocab is None, "a draft without a head speaks the target's vocabulary"
    draws = Draws(seed)
    layer = draws.layer(2 * hidden, hidden, inner, heads, kv_heads, std)
    layer |= {"input_layernorm.weight": draws.norm(hidden), "hidden_norm.weight": draws.norm(hidden)}
    ids = sorted(torch.randperm(vocab, generator=draws.generator)[: draft_vocab or vocab].tolist())
    state = {"fc.weight": draws.matrix(hidden, 3 * hidden, std), "norm.weight": draws.norm(hidden)}
    state["lm_head.weight"] = draws.matrix(len(ids), hidden, 2 * std)
    if agree:
        embed = embedding_weight(target_state).float()
        layer |= agreeing_layer(draws, layer, hidden)
        state["fc.weight"] = draws.matrix(hidden, 3 * hidden, LITTLE)
        state["fc.weight"][:, :hidden] += torch.eye(hidden) / root_mean_square(embed)
        state["norm.weight"] = target_state["model.norm.weight"].float()
        state["lm_head.weight"] = head_weight(target_state).float()[ids]
    if not own_head:
        del state["lm_head.weight"]
    state |= {f"{layer_prefix}{key}": tensor for key, tensor in layer.items()}
    config: dict[str, Any] = draft_config(target_config, inner, heads, kv_heads)
    config |= {"architectures": [architecture], "draft_vocab_size": len(ids)}
    config |= {} if rope_theta is None else {"rope_theta": rope_theta}
    config |= {"norm_before_residual": True} if norm_before_residual else {}
    layers = target_config["num_hidden_layers"]
    if aux_layers is None and layers < 7:
        aux_layers = [0, layers // 2, layers]
    if aux_layers is not None:
        nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(aux_layers)}
        config["eagle_config"] = nested
    if draft_vocab is not None:
        state["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        state["t2d"][ids] = True
    return save_checkpoint(path, in_half(state), config, safetensors)


def agreeing_layer(draws: Draws, layer: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """Each row attends to itself, takes its old hidden away and puts the normed embedding in its place."""
    eye, zero = torch.eye(hidden), torch.zeros(hidden, hidden)
    return {
        "self_attn.q_proj.weight": FOCUS * torch.cat([eye, zero], dim=1),
        "self_attn.k_proj.weight": FOCUS * torch.cat([eye, zero], dim=1),
        "self_attn.v_proj.weight": torch.cat([eye, -eye], dim=1),
        "self_attn.o_proj.weight": eye,
        "mlp.down_proj.weight": draws.like(layer["mlp.down_proj.weight"], LITTLE),
        "input_layernorm.weight": torch.ones(hidden),
        "hidden_norm.weight": torch.ones(hidden),
    }


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
