"""``--speculative-draft-config-override``: what the user knows better than a draft's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FLAG = "--speculative-draft-config-override"
KINDS = ("EAGLE", "EAGLE3", "MTP")


@dataclass(frozen=True, slots=True)
class Field:
    """One accepted field: what its value must be, in words and as a test, and the heads that have it."""

    words: str
    accepts: Callable[[Any], bool]
    kinds: tuple[str, ...] = KINDS


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


_COUNT = Field("a positive integer", _is_count)
_NUMBER = Field("a positive number", _is_number)
_SIDE = "pre or post", lambda value: value in ("pre", "post")
_TRUTH = "true or false", lambda value: isinstance(value, bool)

FIELDS: dict[str, Field] = {
    "rope_theta": _NUMBER,
    "rope_scaling": Field("an object or null", lambda value: value is None or isinstance(value, dict)),
    "eagle_aux_hidden_state_layer_ids": Field(
        "a list of integers, the layers whose input is read", _is_list, ("EAGLE3",)
    ),
    "use_aux_hidden_state": Field(*_TRUTH, kinds=("EAGLE3",)),
    "use_own_embedding": Field(*_TRUTH, kinds=("EAGLE", "EAGLE3")),
    "norm_before_residual": Field(*_TRUTH, kinds=("EAGLE3",)),
    "norm_before_head": Field(*_TRUTH, kinds=("EAGLE3",)),
    "recycled_hidden": Field(*_SIDE),
    "mtp_hidden": Field(*_SIDE, kinds=("MTP",)),
    "num_attention_heads": _COUNT,
    "vocab_size": _COUNT,
    "target_hidden_size": Field(_COUNT.words, _is_count, ("EAGLE3",)),
    "rms_norm_eps": _NUMBER,
}


def parse_overrides(text: str | None) -> dict[str, Any]:
    """The fields of a JSON object, each checked. Raises ValueError naming flag, field and accepted values."""
    fields = json.loads(text) if text else {}
    if not isinstance(fields, dict):
        raise ValueError(f"{FLAG}: must be a JSON object, found {text}")
    for name, value in fields.items():
        if name not in FIELDS:
            raise ValueError(f"{FLAG}: {name} is not known; accepted: {', '.join(FIELDS)}")
        if not FIELDS[name].accepts(value):
            raise ValueError(f"{FLAG}: {name} must be {FIELDS[name].words}, found {value!r}")
    return fields


def check_kind(overrides: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError for a field that a head of this kind does not have."""
    for name in overrides:
        if kind not in FIELDS[name].kinds:
            wanted = " and ".join(FIELDS[name].kinds)
            raise ValueError(f"{FLAG}: {name} is a field of {wanted} heads, the draft is an {kind} head")
