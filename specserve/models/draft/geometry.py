"""The shape of a draft's layer and its rotary embedding, tensors before fields, each choice noted."""

from __future__ import annotations

import dataclasses

from specserve.layers.decoder import LayerConfig
from specserve.layers.rotary import RopeConfig, rope_fields
from specserve.models.config import ModelConfig, layer_config, rope_config
from specserve.models.draft.source import Source


def read_layer(source: Source, input_factor: int) -> LayerConfig:
    """Head size and key heads follow from the projections; biases and the norms of q and k from their presence."""
    layer = layer_config({**source.config, "num_key_value_heads": None, "head_dim": None}, source.config_file)
    head_dim, kv_heads = _heads(source, layer.num_heads)
    _note_declared(source, "head_dim", head_dim)
    _note_declared(source, "num_key_value_heads", kv_heads)
    return dataclasses.replace(
        layer,
        input_size=input_factor * layer.hidden_size,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        qkv_bias=any(f"self_attn.{name}_proj.bias" in source for name in "qkv"),
        o_bias="self_attn.o_proj.bias" in source,
        mlp_bias=any(f"mlp.{name}_proj.bias" in source for name in ("gate", "up", "down")),
        qk_norm=any(f"self_attn.{name}_norm.weight" in source for name in "qk"),
    )


def _heads(source: Source, num_heads: int) -> tuple[int, int]:
    """Head size and number of key heads."""
    q_rows, k_rows = (source.matrix(f"self_attn.{name}_proj.weight")[0] for name in "qk")
    head_dim = q_rows // num_heads
    if head_dim * num_heads != q_rows or k_rows % head_dim or num_heads % max(1, k_rows // head_dim):
        file = source.files.file(source.stored("self_attn.q_proj.weight"))
        raise ValueError(
            f"{file}: q_proj has {q_rows} rows and k_proj {k_rows}, which do not fit num_attention_heads {num_heads}"
        )
    return head_dim, k_rows // head_dim


def _note_declared(source: Source, name: str, found: int) -> None:
    declared = source.config.get(name)
    if declared not in (None, found):
        source.note(f"{name} {found}: its projections have that many rows, its config says {declared}")


def read_rope(source: Source) -> RopeConfig:
    """Base 10000 where the config names none: never the target's, which published drafts were not trained with."""
    rope = rope_config(source.config, source.config_file)
    named = rope_fields(source.config).get("rope_theta") or source.config.get("rope_theta")
    why = source.origin("rope_theta") if named else "its config has no rope_theta"
    scaled = f" ({source.origin('rope_scaling')})" if "rope_scaling" in source.overrides else ""
    source.note(f"rotary base {rope.theta:g} ({why}), scaling {rope.kind}{scaled}")
    return rope


def check_vocabulary(source: Source, target: ModelConfig) -> int:
    """The target's number of tokens, for which the draft must have been made."""
    vocab = source.config.get("vocab_size")
    if vocab != target.vocab_size:
        raise ValueError(
            f"{source.config_file}: vocab_size {vocab!r} does not fit the target's {target.vocab_size}"
        )
    return target.vocab_size


def check_hidden_size(source: Source, layer: LayerConfig, target: ModelConfig) -> None:
    if layer.hidden_size != target.hidden_size:
        raise ValueError(
            f"{source.config_file}: hidden_size {layer.hidden_size} does not fit the target's {target.hidden_size}"
        )


def wants_own_embedding(source: Source, layer: LayerConfig, target: ModelConfig) -> bool:
    """Whether the file's embedding is used. The target's is preferred: exports exist whose own is random."""
    own, shape = "embed_tokens.weight" in source, (target.vocab_size, target.hidden_size)
    if source.get("use_own_embedding") and not own:
        source.shape("embed_tokens.weight")  # says that there is none
    if layer.hidden_size != target.hidden_size and not own:
        raise ValueError(
            f"{source.config_file}: hidden_size {layer.hidden_size} does not fit the target's {target.hidden_size}, "
            "whose embedding it reads: it has no tensor embed_tokens.weight of its own"
        )
    if not own:
        source.note("embedding: the target's (its file has none)")
        return False
    wanted, why = _own_embedding(source, source.shape("embed_tokens.weight") != shape)
    whose = "its own" if wanted else "the target's"
    source.note(f"embedding: {whose} ({why})")
    return wanted


def _own_embedding(source: Source, differs: bool) -> tuple[bool, str]:
    if differs:
        return True, "its shape is not that of the target's"
    if source.get("use_own_embedding") is not None:
        return source.flag("use_own_embedding"), source.origin("use_own_embedding")
    if source.flag("embed_requires_grad"):
        return True, f"{source.origin('embed_requires_grad')}: it was trained"
    return False, "its file's has the same shape; use_own_embedding takes that"
