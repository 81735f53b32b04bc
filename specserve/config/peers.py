"""Read how other servers are told to speculate: vLLM's --speculative-config, and the variables of SGLang and
TensorRT-LLM for acceptance that is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

from specserve.config import checks
from specserve.config.declare import VALUE_TYPES, Setting, Value, convert
from specserve.config.settings import SETTINGS
from specserve.methods import MAX_NODES

VLLM, DRAWN = "speculative_config", "speculative_synthetic_acceptance"
_SAME = {
    "method": "speculative_algorithm",
    "model": "speculative_draft_model_path",
    "revision": "speculative_draft_model_revision",
    "num_speculative_tokens": "speculative_num_steps",
}
_METHOD = "rejection_sample_method"
_LENGTH, _RATES = "synthetic_acceptance_length", "synthetic_acceptance_rates"
KEYS = (*_SAME, _METHOD, _LENGTH, _RATES)
_METHODS = "standard", "strict", "synthetic"

MEANS = {"SGLANG_SIMULATE_ACC_LEN": 0, "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": 1}
"""How many of a step's tokens each variable leaves out."""
_ONLY = {
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
}


def of_vllm(raw: Any, label: str) -> dict[str, Value]:
    """Return the settings that an object of vLLM's, or its JSON, stands for: a chain of drafts. Raises ValueError
    beginning with ``label``."""
    if isinstance(raw, str):
        if problem := checks.json_object(raw):
            raise ValueError(f"{label}: {problem}")
        raw = json.loads(raw)
    if not isinstance(raw, dict):
        raise ValueError(f"{label}: must be a JSON object, found {raw!r}")
    idle = {"draft_tensor_parallel_size": 1}
    given = {key: value for key, value in raw.items() if value is not None and idle.get(key) != value}
    if unknown := [key for key in given if key not in KEYS]:
        raise ValueError(f"{label}: {unknown[0]} is not accepted; accepted are {', '.join(KEYS)}")
    if "method" not in given:
        raise ValueError(f"{label}: method is needed")
    values = {
        ours: convert(SETTINGS[ours], given[key], f"{label}: {key}")
        for key, ours in _SAME.items()
        if key in given
    }
    steps = values.get("speculative_num_steps")
    if isinstance(steps, int):
        values |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": steps + 1}
    how, drawn = given.get(_METHOD, _METHODS[0]), [key for key in (_LENGTH, _RATES) if key in given]
    if how not in _METHODS:
        raise ValueError(f"{label}: {_METHOD}: must be one of {', '.join(_METHODS)}, found {how!r}")
    if len(drawn) != (how == "synthetic"):
        raise ValueError(f"{label}: {_METHOD} synthetic, and no other, needs one of {_LENGTH} and {_RATES}")
    if _LENGTH in drawn:
        values[DRAWN] = _mean(given[_LENGTH], f"{label}: {_LENGTH}")
    elif drawn:
        values[DRAWN] = _conditional(given[_RATES], steps, f"{label}: {_RATES}")
    return values


def asking(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that ask for acceptance to be drawn: 0 and less turn it off."""
    return [name for name in MEANS if (text := environ.get(name, "").strip("0. ")) and text[0] != "-"]


def simulated(environ: Mapping[str, str]) -> str | None:
    """Return the mean of tokens a step that a variable asks for, None if none does. Raises ValueError."""
    on = asking(environ)
    means = [_mean(environ[name], name, MEANS[name]) for name in on]
    if len(on) > 1:
        raise ValueError(f"{' and '.join(on)} are both set; set one")
    for name, value in _ONLY.items():
        if on and environ.get(name, value) != value:
            raise ValueError(f"{name}: must be {value}, found {environ[name]!r}")
    return means[0] if means else None


def _mean(raw: Any, label: str, less: int = 0) -> str:
    """Return tokens a step, of which ``raw`` leaves out ``less``."""
    number = Setting(label, float, None, "", "", low=1 - less, high=MAX_NODES - less)
    return f"{cast(float, convert(number, raw, label)) + less:g}"


def _conditional(rates: Any, steps: Any, label: str) -> str:
    """Return the probability of each level after the one above it, from that of each level with all above it."""
    numbers = isinstance(rates, list) and all(VALUE_TYPES[float].accepts(rate) for rate in rates)
    if not numbers or len(rates) != steps or sorted([1, *rates, 0], reverse=True) != [1, *rates, 0]:
        raise ValueError(
            f"{label}: must be a list of num_speculative_tokens numbers from 1 down to 0, found {rates}"
        )
    after = [rate / above if above else 0 for above, rate in pairwise([1, *rates, 0])]
    return ",".join(f"{rate:g}" for rate in after)
