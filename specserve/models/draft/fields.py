"""Fields of a draft's ``config.json``: what their values must be, and which of them the user may replace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FLAG = "--speculative-draft-config-override"
LIST = "eagle_aux_hidden_state_layer_ids"
KINDS = ("EAGLE", "EAGLE3", "MTP")


@dataclass(frozen=True, slots=True)
class Field:
    """A field's values, in words and as a test. ``kinds``: the heads for which the flag takes it; ``hint``: what the
    flag's errors add to the words."""

    words: str
    accepts: Callable[[Any], bool]
    kinds: tuple[str, ...] = ()
    hint: str = ""


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


_COUNT = "a positive integer", _is_count
_NUMBER = "a positive number", _is_number
_OBJECT = "an object or null", lambda value: value is None or isinstance(value, dict)
_SIDE = "pre or post", lambda value: value in ("pre", "post")
_TRUTH = "true or false", lambda value: isinstance(value, bool)

FIELDS: dict[str, Field] = {
    "rope_theta": Field(*_NUMBER, KINDS),
    "rope_scaling": Field(*_OBJECT, KINDS),
    LIST: Field("a list of integers", _is_list, ("EAGLE3",), ", the layers whose input is read"),
    "use_aux_hidden_state": Field(*_TRUTH, ("EAGLE3",)),
    "use_own_embedding": Field(*_TRUTH, ("EAGLE", "EAGLE3")),
    "norm_before_residual": Field(*_TRUTH, ("EAGLE3",)),
    "norm_before_head": Field(*_TRUTH, ("EAGLE3",)),
    "recycled_hidden": Field(*_SIDE, KINDS),
    "mtp_hidden": Field(*_SIDE, ("MTP",)),
    "num_attention_heads": Field(*_COUNT, KINDS),
    "vocab_size": Field(*_COUNT, KINDS),
    "target_hidden_size": Field(*_COUNT, ("EAGLE3",)),
    "rms_norm_eps": Field(*_NUMBER, KINDS),
    "add_para_norm": Field(*_TRUTH),
    "embed_requires_grad": Field(*_TRUTH),
    "fc_norm": Field(*_TRUTH),
    "layernorms": Field(*_TRUTH),
    "norm_before_fc": Field(*_TRUTH),
    "norm_output": Field(*_TRUTH),
    "tie_word_embeddings": Field(*_TRUTH),
}


def parse_overrides(text: str | None) -> dict[str, Any]:
    """The fields of a JSON object, each checked. Raises ValueError naming flag, field and accepted values."""
    given = json.loads(text) if text else {}
    if not isinstance(given, dict):
        raise ValueError(f"{FLAG}: must be a JSON object, found {text}")
    taken = {name: field for name, field in FIELDS.items() if field.kinds}
    for name, value in given.items():
        if name not in taken:
            raise ValueError(f"{FLAG}: {name} is not known; accepted: {', '.join(taken)}")
        if not taken[name].accepts(value):
            raise ValueError(f"{FLAG}: {name} must be {taken[name].words}{taken[name].hint}, found {value!r}")
    return given


def check_kind(overrides: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError for a field that a head of this kind does not have."""
    for name in overrides:
        if kind not in FIELDS[name].kinds:
            wanted = " and ".join(FIELDS[name].kinds)
            raise ValueError(f"{FLAG}: {name} is a field of {wanted} heads, the draft is an {kind} head")
