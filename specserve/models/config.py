"""A target model's configuration, and helpers for reading a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from specserve_kernels import Gate

from specserve.kv.spec import MOST_LEVELS, DeltaState, KVSpec
from specserve.layers.config import LayerConfig
from specserve.layers.linear import PLAIN
from specserve.layers.ranks import ONE, Ranks, whole_of
from specserve.layers.rotary import RopeConfig
from specserve.layers.weights import WeightFormat

log = logging.getLogger(__name__)
_LLAMA = (
    *("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    *("rms_norm_eps", "input_size", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a target model. ``ropes``: the rotary embeddings that layers choose from, the one of whole
    attention first. ``random``: the owner of weights that are drawn instead of read, None: they are read.
    ``logit_cap``: c, if logits x become ``c * tanh(x / c)``. ``notes`` say what was chosen while it was read."""

    architecture: str
    vocab_size: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None
    weights: WeightFormat = PLAIN
    random: str | None = None
    logit_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    notes: tuple[str, ...] = field(default=(), repr=False)
    ranks: Ranks = field(default=ONE, repr=False, compare=False)

    def on(self, ranks: Ranks) -> ModelConfig:
        """Return a rank's part. Raises ValueError naming a size that can't be shared out."""
        return replace(self, ranks=ranks, layers=tuple(layer.on(ranks) for layer in self.layers))

    def with_weights(self, weights: WeightFormat) -> ModelConfig:
        """Return a copy with another weight format in all layers."""
        layers = tuple(replace(layer, weights=weights) for layer in self.layers)
        return replace(self, weights=weights, layers=layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.layers[0].hidden_size

    @property
    def draft_layer(self) -> LayerConfig:
        """The geometry that a draft's layer has if nothing else is said: Llama's layer with plain weights, in the sizes
        of the last one that stores keys and values, with its biases and norms of heads."""
        last = self.layers[self.kv_numbers[-1]]
        sizes: dict[str, Any] = {name: whole_of(getattr(last, name)) for name in _LLAMA}
        return LayerConfig(**sizes)

    @property
    def next_layer(self) -> LayerConfig:
        """The geometry of one more layer after the last, as the last one that stores keys and values."""
        return replace(self.layers[self.kv_numbers[-1]], index=self.kv_layers)

    @property
    def rope(self) -> RopeConfig:
        return self.ropes[0]

    def kv(self, dtype: torch.dtype) -> list[KVSpec]:
        """Return the layout of the KV cache of each layer that stores keys and values."""
        return [self.layers[number].kv(dtype) for number in self.kv_numbers]

    @property
    def kv_numbers(self) -> list[int]:
        """The layers that store keys and values: all, or those that neither read another's nor keep a state."""
        return [n for n, layer in enumerate(self.layers) if layer.reads is None and layer.state is None]

    @property
    def kv_layers(self) -> int:
        return len(self.kv_numbers)

    @property
    def states(self) -> list[DeltaState]:
        """What each layer keeps that keeps a state."""
        return [layer.state for layer in self.layers if layer.state is not None]

    @property
    def most_levels(self) -> int | None:
        """The deepest node of a tree that the model can verify, None: any."""
        return MOST_LEVELS if self.states else None

    @property
    def longest_context(self) -> tuple[int, str]:
        """The longest context that the model supports, and the config field that limits it. A scaled rope extends the
        trained positions."""
        longest, limit, rope = self.max_position_embeddings, "max_position_embeddings", self.rope
        scaled = int(rope.original_max_position_embeddings * rope.factor)
        if rope.kind in ("linear", "yarn") and scaled > longest:
            longest, limit = scaled, f"{rope.kind} rope scaling"
        return longest, limit


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError naming the file if it is missing, unreadable or not an object."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


class Values(NamedTuple):
    """The accepted values of a field, in words and as a test."""

    words: str
    accepts: Callable[[Any], bool]

    @property
    def or_null(self) -> Values:
        return Values(f"{self.words} or null", lambda value: value is None or self.accepts(value))


COUNT = Values("a positive integer", lambda value: type(value) is int and value > 0)
SIZE = Values("an integer of at least 0", lambda value: type(value) is int and value >= 0)
NUMBER = Values("a positive number", lambda value: type(value) in (int, float) and value > 0)
LIST = Values("a list", lambda value: isinstance(value, list))
OBJECT = Values("an object", lambda value: isinstance(value, dict))
TEXT = Values("text", lambda value: isinstance(value, str))
TRUTH = Values("true or false", lambda value: isinstance(value, bool))


def check(
    fields: Mapping[str, Any], source: Path, values: Values, *names: str, optional: bool = False
) -> None:
    """Raise ValueError naming the first field whose value is not accepted."""
    for name in names:
        found = fields.get(name)
        if not (optional and found is None) and not values.accepts(found):
            raise ValueError(f"{source}: {name} must be {values.words}, found {found!r}")


def rope_config(config: Mapping[str, Any], source: Path) -> RopeConfig:
    """Read the rotary embedding's configuration. Raises ValueError naming the file if its kind is unknown."""
    check_rope_fields(config, source)
    try:
        rope = RopeConfig.from_dict(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    written = (config.get("rope_parameters") or {}).get("rope_theta") or rope.theta
    if config.get("rope_scaling") and written != rope.theta:
        log.warning(
            "%s: rope_scaling replaces rope_parameters, as in transformers: rope_theta is %g, not %g. To change it, "
            "write rope_theta into rope_scaling",
            source,
            rope.theta,
            written,
        )
    return rope


def ropes_by_kind(
    config: Mapping[str, Any], source: Path, whole: float, sliding: float
) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of whole and of sliding attention, under transformers 5's names or the earlier ones; a
    ``rope_scaling`` is of whole attention. ``whole``, ``sliding``: their bases if none is named."""
    check_rope_fields(config, source)
    kinds, plain = config.get("rope_parameters") or {}, {**config, "rope_scaling": None}
    check(kinds, source, OBJECT.or_null, FULL, SLIDING)
    of_whole = kinds if {FULL, SLIDING}.isdisjoint(kinds) else kinds.get(FULL) or {}
    full = {"rope_theta": whole, **of_whole, **(config.get("rope_scaling") or {})}
    local = {"rope_theta": sliding, **(kinds.get(SLIDING) or {})}
    first, second = (rope_config({**plain, "rope_parameters": each}, source) for each in (full, local))
    return first, second


def check_rope_fields(config: Mapping[str, Any], source: Path) -> None:
    """Raise ValueError naming a field of an unexpected type."""
    check(config, source, OBJECT.or_null, "rope_scaling", "rope_parameters")
    for fields in (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        check(fields, source, NUMBER, "rope_theta", "partial_rotary_factor", optional=True)


ACTIVATIONS: Mapping[str, Gate] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def layer_config(
    config: Mapping[str, Any],
    source: Path,
    activations: Mapping[str, Gate] = ACTIVATIONS,
    name: str = "hidden_act",
) -> LayerConfig:
    """Read the geometry of a decoder layer. ``name``: the field of its activation, silu if it is absent. Raises
    ValueError naming a missing or invalid field."""
    check(config, source, COUNT, "hidden_size", "intermediate_size", "num_attention_heads")
    check(config, source, COUNT.or_null, "num_key_value_heads", "head_dim")
    check({"rms_norm_eps": 1e-6, **config}, source, NUMBER, "rms_norm_eps")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if (activation := config.get(name, "silu")) not in [*activations]:
        raise ValueError(f"{source}: {name} must be {' or '.join(activations)}, found {activation!r}")
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        input_size=hidden,
        activation=activations[activation],
    )


def with_windows(
    layer: LayerConfig,
    window: int | None,
    fields: Mapping[str, Any],
    windowed: Callable[[int], bool],
    rope: int = 0,
) -> list[LayerConfig]:
    """Repeat a layer, with the window and its ``rope`` where ``layer_types`` says so; without that field, where
    ``windowed`` does."""
    count, types = fields["num_hidden_layers"], fields.get("layer_types")
    if types is None:
        types = [SLIDING if windowed(number) else FULL for number in range(count)]
    check_kinds("layer_types", types, count, SLIDING, FULL)
    sliding = replace(layer, softmax=replace(layer.softmax, window=window), rope=rope)
    return [sliding if kind == SLIDING else layer for kind in types]


def check_kinds(name: str, kinds: Any, count: int, *known: str) -> None:
    """Raise ValueError unless a field names one of the known kinds for each of ``count`` layers."""
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        raise ValueError(f"{name} must name {' or '.join(known)} for each of {count} layers, found {kinds}")


SLIDING, FULL = "sliding_attention", "full_attention"
