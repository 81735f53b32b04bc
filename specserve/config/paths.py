"""Which files a server uses: the bundled model, a local directory, or a download from the hub."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from specserve.config.settings import Settings

BUNDLED = Path(__file__).parent.parent / "bundled"
BUNDLED_MODEL = BUNDLED / "chat"
BUNDLED_DRAFTS = {"EAGLE": BUNDLED / "eagle", "EAGLE3": BUNDLED / "eagle3"}
BUNDLED_NAME = "specserve-chat"

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "*.py"]


def resolve_paths(settings: Settings) -> tuple[Settings, list[str]]:
    """Returns a copy whose paths are local and whose model has a name, and a note on each choice.

    Does nothing to a copy it has made. Raises ValueError naming the flag and the path.
    """
    notes: list[str] = []
    model = settings.model_path
    if model is None:
        model = str(BUNDLED_MODEL)
        notes.append(f"model_path = {model}: none was given, serving the bundled model")
    model_path = _local("--model-path", model, notes)
    tokenizer = settings.tokenizer_path
    resolved = replace(
        settings,
        model_path=str(model_path),
        tokenizer_path=str(model_path if tokenizer is None else _local("--tokenizer-path", tokenizer, notes)),
        served_model_name=settings.served_model_name or _names(model, model_path),
        speculative_draft_model_path=_draft(settings, model_path, notes),
    )
    return resolved, notes


def _names(given: str, path: Path) -> tuple[str, ...]:
    if _same(path, BUNDLED_MODEL):
        return (BUNDLED_NAME,)
    last = Path(given).name or path.resolve().name
    return (last,) if Path(given).exists() else (last, given)


def _draft(settings: Settings, model_path: Path, notes: list[str]) -> str | None:
    flag, draft = "--speculative-draft-model-path", settings.speculative_draft_model_path
    if settings.speculative_algorithm == "NONE":
        return draft
    if draft is not None:
        return str(_local(flag, draft, notes))
    bundled = BUNDLED_DRAFTS.get(settings.speculative_algorithm)
    if bundled is None or not _same(model_path, BUNDLED_MODEL):
        raise ValueError(
            f"{flag}: needed for --speculative-algorithm {settings.speculative_algorithm} with {model_path}"
        )
    notes.append(f"speculative_draft_model_path = {bundled}: none was given, using the bundled draft")
    return str(_local(flag, str(bundled), notes))


def _local(flag: str, given: str, notes: list[str]) -> Path:
    path = Path(given).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{flag}: {given} is not a directory")
    if not _HUB_ID.fullmatch(given):
        raise ValueError(f"{flag}: {given} does not exist")
    return _download(flag, given, notes)


def _download(flag: str, repo: str, notes: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repo, allow_patterns=_FILES))
    except Exception as error:  # the hub client raises its own, requests' and OS errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{flag}: {repo} is no directory and can't be had from the hub: {reason}") from None
    notes.append(f"{flag} {repo}: using the hub's files in {path}")
    return path


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
