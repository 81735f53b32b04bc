"""The forward of Llama and similar models (Mistral, Qwen2, Qwen3, MiMo, Gemma 3) over a whole sequence, from Hugging
Face tensors and config (formats.md section 11). Biases and norms are used if the checkpoint has them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .doubles import float32_means_float64

State = Mapping[str, Tensor]
Config = Mapping[str, Any]

# Shapes: n tokens, h hidden, V vocabulary, hd head dim.


@dataclass
class LlamaOutput:
    logits: Tensor  # [n, V]
    hidden: Tensor  # [n, h] after the final norm: what the lm_head sees
    streams: list[Tensor]  # [n, h] each: streams[L] enters layer L, streams[N] leaves the last, all un-normed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.to(x.dtype)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    """x Wᵀ, plus the bias when the checkpoint has one. For FP8 weights rows of x are rounded to FP8, each with its
    largest number at 448."""
    if f"{name}.rounded_inputs" in state:
        scale = x.abs().amax(1, keepdim=True) / 448
        x = (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    y = x @ state[f"{name}.weight"].to(x.dtype).T
    if f"{name}.bias" in state:
        y = y + state[f"{name}.bias"].to(x.dtype)
    return y


def rope_of(config: Config, head_dim: int) -> tuple[tuple[float, ...], float]:
    """transformers' frequencies, and what it multiplies cos and sin with. Both spellings: rope_parameters (transformers
    5), rope_theta + rope_scaling, which goes before. Base 10000 when absent."""
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    settings["rope_type"] = settings.get("rope_type", settings.pop("type", "default"))
    settings.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return _rope(json.dumps(settings), config["max_position_embeddings"], head_dim)


@cache
def _rope(settings: str, positions: int, head_dim: int) -> tuple[tuple[float, ...], float]:
    # Here, as it takes a second and few tests need it.
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"head_dim": head_dim, "max_position_embeddings": positions}
    with torch.inference_mode(False), float32_means_float64():
        table = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=json.loads(settings), **sizes))
    return tuple(table.inv_freq.tolist()), table.attention_scaling


@cache
def turns(positions: int, frequencies: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all angles, which each head of each layer needs."""
    with torch.inference_mode(False):
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * torch.tensor(
            frequencies, dtype=torch.float64
        )
        return torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)


def rotate(x: Tensor, frequencies: Sequence[float], scale: float = 1.0) -> Tensor:
    """Half-split pairs: channel j turns with channel j + hd/2; row i of x [..., n, hd] is at position i. The result is
    `scale` times as long."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = turns(x.shape[-2], tuple(frequencies), x.dtype)
    return scale * torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def is_gemma(config: Config) -> bool:
    return config.get("model_type") == "gemma3_text"


def norm(state: State, name: str, config: Config, x: Tensor) -> Tensor:
    """A norm over the last dimension, where the checkpoint has one. Gemma stores its weight minus 1."""
    weight = state.get(f"{name}.weight")
    return x if weight is None else rms_norm(x, is_gemma(config) + weight.to(x.dtype), config["rms_norm_eps"])


def window_of(config: Config, layer: int) -> int | None:
    """Tokens that a layer sees, its own included; None: all before it."""
    family, window = config.get("model_type"), config.get("sliding_window")
    if family == "mistral":
        return window
    if is_gemma(config) or (family in ("qwen2", "qwen3") and config["use_sliding_window"]):
        return window if config["layer_types"][layer] == "sliding_attention" else None
    return None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """[heads, n, hd] each: row i sees rows 0..i, or the last `window` of them."""
    scores = q @ k.mT * scale
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    if window is not None:
        unseen |= torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-window)
    return torch.softmax(scores.masked_fill(unseen, -math.inf), dim=-1) @ v


def self_attention(state: State, prefix: str, config: Config, x: Tensor, window: int | None = None) -> Tensor:
    """x [n, in] -> [n, h]. `prefix` ends before q_proj; the head dim comes from the tensors."""
    if is_gemma(config):
        kind = "full_attention" if window is None else "sliding_attention"
        config = {**config, "rope_parameters": config["rope_parameters"][kind]}
    heads = config["num_attention_heads"]
    head_dim = state[f"{prefix}q_proj.weight"].shape[0] // heads
    frequencies, scale = rope_of(config, head_dim)
    q, k, v = (
        linear(state, f"{prefix}{name}_proj", x).unflatten(1, (-1, head_dim)).transpose(0, 1)
        for name in "qkv"
    )
    q = rotate(norm(state, f"{prefix}q_norm", config, q), frequencies, scale)
    k = rotate(norm(state, f"{prefix}k_norm", config, k), frequencies, scale)
    k, v = (each.repeat_interleave(heads // len(each), dim=0) for each in (k, v))
    of_scores = config["query_pre_attn_scalar"] ** -0.5 if is_gemma(config) else head_dim**-0.5
    out = causal_attention(q, k, v, of_scores, window)
    return linear(state, f"{prefix}o_proj", out.transpose(0, 1).flatten(1))


def gated_mlp(state: State, prefix: str, x: Tensor, gelu: bool = False) -> Tensor:
    gate = linear(state, f"{prefix}gate_proj", x)
    up = linear(state, f"{prefix}up_proj", x)
    share = torch.sigmoid(gate)
    if gelu:
        share = (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
    return linear(state, f"{prefix}down_proj", gate * share * up)


def embedding_weight(state: State) -> Tensor:
    return state["model.embed_tokens.weight"]


def head_weight(state: State) -> Tensor:
    """A tied checkpoint has no lm_head.weight."""
    return state["lm_head.weight"] if "lm_head.weight" in state else embedding_weight(state)


def forward(
    state: State, config: Config, tokens: Sequence[int], dtype: torch.dtype = torch.float64
) -> LlamaOutput:
    gemma = is_gemma(config)
    x = embedding_weight(state)[torch.tensor(list(tokens))].to(dtype)
    x = x * config["hidden_size"] ** 0.5 if gemma else x
    streams = [x]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed = norm(state, f"{prefix}input_layernorm", config, x)
        attended = self_attention(state, f"{prefix}self_attn.", config, normed, window_of(config, layer))
        after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
        x = x + (norm(state, f"{prefix}{after}", config, attended) if gemma else attended)
        normed = norm(state, f"{prefix}{before if gemma else after}", config, x)
        mlp = gated_mlp(state, f"{prefix}mlp.", normed, gemma)
        x = x + norm(state, f"{prefix}post_feedforward_layernorm", config, mlp)
        streams.append(x)
    hidden = norm(state, "model.norm", config, x)
    head = {**state, "lm_head.weight": head_weight(state)}
    return LlamaOutput(linear(head, "lm_head", hidden), hidden, streams)
