"""Fields of a draft's ``config.json``: their valid values, and which of them the user may override."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.models.config import COUNT, NUMBER, OBJECT, TRUTH, Values

FLAG = "--speculative-draft-config-override"
LIST = "eagle_aux_hidden_state_layer_ids"
KINDS = ("EAGLE", "EAGLE3", "MTP", "P_EAGLE")
_AUTOREGRESSIVE = ("EAGLE", "EAGLE3", "MTP", "NEXTN")
_FUSED = ("EAGLE3", "P_EAGLE")


@dataclass(frozen=True, slots=True)
class DraftField:
    """``kinds``: the heads for which the flag accepts it. ``hint``: added to the expected values in the flag's
    errors."""

    values: Values
    kinds: tuple[str, ...] = ()
    hint: str = ""


_LIST = Values(
    "a list of integers", lambda found: found and type(found) is list and {*map(type, found)} == {int}
)
_ID = Values("a token id", lambda found: type(found) is int and found >= 0)
_SIDE = Values("pre or post", lambda found: found in ("pre", "post"))

FIELDS: dict[str, DraftField] = {
    "rope_theta": DraftField(NUMBER, KINDS),
    "rope_scaling": DraftField(OBJECT.or_null, KINDS),
    LIST: DraftField(_LIST, _FUSED, ", the layers whose input is read"),
    "use_aux_hidden_state": DraftField(TRUTH, _FUSED),
    "use_own_embedding": DraftField(TRUTH, ("EAGLE", *_FUSED)),
    "norm_before_residual": DraftField(TRUTH, _FUSED),
    "norm_before_head": DraftField(TRUTH, _FUSED),
    "recycled_hidden": DraftField(_SIDE, _AUTOREGRESSIVE),
    "mask_token_id": DraftField(_ID, ("P_EAGLE",)),
    "mtp_hidden": DraftField(_SIDE, ("MTP", "NEXTN")),
    "num_attention_heads": DraftField(COUNT, KINDS),
    "vocab_size": DraftField(COUNT, KINDS),
    "target_hidden_size": DraftField(COUNT, _FUSED),
    "rms_norm_eps": DraftField(NUMBER, KINDS),
}
FIELDS |= dict.fromkeys(("add_para_norm", "embed_requires_grad", "fc_norm", "layernorms"), DraftField(TRUTH))
FIELDS |= dict.fromkeys(("pard_token", "ptd_token_id"), DraftField(_ID))
FIELDS |= dict.fromkeys(("norm_before_fc", "norm_output", "tie_word_embeddings"), DraftField(TRUTH))


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Return the checked fields of a JSON object. Raises ValueError naming flag, field and accepted values."""
    given = json.loads(text) if text else {}
    if not isinstance(given, dict):
        raise ValueError(f"{FLAG}: must be a JSON object, found {text}")
    taken = {name: field for name, field in FIELDS.items() if field.kinds}
    for name, value in given.items():
        if name not in taken:
            raise ValueError(f"{FLAG}: {name} is not known; accepted: {', '.join(taken)}")
        values, hint = taken[name].values, taken[name].hint
        if not values.accepts(value):
            raise ValueError(f"{FLAG}: {name} must be {values.words}{hint}, found {value!r}")
    return given


def refuse_overrides(text: str | None, method: str) -> None:
    """Raise ValueError for any override of a draft that has no such fields."""
    if overrides := parse_overrides(text):
        raise ValueError(
            f"{FLAG}: {', '.join(overrides)}: fields of draft heads, but the draft of {method} is a whole model"
        )


def check_same(config: Mapping[str, Any], source: Path, wanted: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError naming the first field that is given and does not have the wanted value."""
    for name, value in wanted:
        if config.get(name) not in (None, value):
            words = f"must be {json.dumps(value)}, found {json.dumps(config[name])}"
            raise ValueError(f"{source}: {name} {words}")


def check_kind(text: str | None, kind: str) -> None:
    """Raise ValueError for an override, given as JSON, that a head of this kind does not have."""
    check_fields(parse_overrides(text), kind)


def check_fields(names: Iterable[str], kind: str) -> None:
    """Raise ValueError for a field that a head of this kind does not have."""
    for name in names:
        if kind not in FIELDS[name].kinds:
            wanted = " and ".join(FIELDS[name].kinds)
            raise ValueError(f"{FLAG}: {name} is a field of {wanted} heads, the draft's are {kind}")
