"""The sampling values of requests that set none: those of the checkpoint's ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.config.notes import CHOSEN, UNUSED, Notes
from specserve.config.settings import Settings
from specserve.core import SamplingParams

FILE = "generation_config.json"
_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""The fields that are read, as by vLLM, and their names in ``SamplingParams``."""
_SILENT = ("do_sample", "transformers_version", "use_cache")
"""Other fields that need no note; nor do those that are private or name tokens."""


def resolve_sampling(settings: Settings, notes: Notes) -> dict[str, float]:
    """Return the defaults of ``SamplingParams`` that the settings, which have local paths, ask for, and note them.
    Raises ValueError naming file and field."""
    file, greedy = Path(settings.model_path or "") / FILE, settings.requests_all_greedy
    defaults = _read(file, notes) if settings.sampling_defaults == "model" and file.exists() else {}
    given = bool(defaults)
    if greedy and defaults.get("temperature"):
        note = f"temperature {defaults['temperature']:g} of {FILE} has no effect: --requests-all-greedy"
        notes[note] = UNUSED
    defaults |= {"temperature": 0} if greedy else {}
    if given:
        listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        note = f"requests that set none get {listed} ({FILE}); --sampling-defaults openai turns this off"
        notes[note] = CHOSEN
    return defaults


def _read(file: Path, notes: Notes) -> dict[str, float]:
    from specserve.models.config import COUNT, TRUTH, check, read_json  # imports torch

    fields = read_json(file)
    check(fields, file, TRUTH, "do_sample", optional=True)
    check(fields, file, COUNT, "max_new_tokens", optional=True)
    given = {name: fields[name] for name in _NAMES if fields.get(name) is not None}
    for name, value in given.items():
        try:
            SamplingParams(**{_NAMES[name]: value})
        except ValueError as error:
            words = str(error).replace(_NAMES[name], name, 1)
            raise ValueError(f"{file}: {words}; correct it, or use --sampling-defaults openai") from None
    defaults = {_NAMES[name]: value for name, value in given.items()}
    if fields.get("do_sample") is False:
        defaults["temperature"] = 0
    if unread := ", ".join(_unread(fields)):
        notes[f"{FILE}: {unread} not read"] = CHOSEN
    return defaults


def _unread(fields: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in fields.items()
        if value  # else it is off
        and name not in (*_NAMES, *_SILENT)
        and not name.startswith("_")
        and not name.endswith("_token_id")
    ]
