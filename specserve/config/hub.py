"""Repositories of the Hugging Face hub: which of their files are fetched, and what to do when they can't be had.

huggingface_hub caches, resumes, shows progress and knows tokens; it reads HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_TIMEOUT = 10.0  # seconds that the hub has to answer before the cache is asked
_SMALL = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_ELSEWHERE = "`hf download` it elsewhere and give its directory"
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository and the flag that names it. ``revision`` None is the main branch, ``cache`` None the hub's own."""

    flag: str
    name: str
    revision: str | None = None
    revision_flag: str = "--revision"
    cache: str | None = None

    def __str__(self) -> str:
        return self.name + (f" at revision {self.revision}" if self.revision else "")


class Files(Protocol):
    """Which of a repository's files are fetched; ``code``: with the Python files that --trust-remote-code runs."""

    def __call__(self, names: Sequence[str], code: bool = False) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """What a repository is used as. ``needs``: patterns of which one must be there, for each group; the first group
    has plain names, by which a cached copy is found."""

    files: Files
    needs: Sequence[Sequence[str]]

    def lacks(self, names: Sequence[str]) -> list[str]:
        """The groups that no name matches, in words."""
        return [
            " or ".join(group)
            for group in self.needs
            if not any(fnmatch.filter(names, pattern) for pattern in group)
        ]


def is_id(given: str) -> bool:
    return _ID.fullmatch(given) is not None


def model_files(names: Sequence[str], code: bool = False) -> list[str]:
    """What is needed of a model or draft: configuration, tokenizer, and weights in one format."""
    small = tokenizer_files(names, code)
    tensors = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    if not tensors:
        return small + [name for name in names if re.fullmatch(r"pytorch_model[^/]*\.bin", name)]
    # ``consolidated`` files hold the same weights, named otherwise.
    once = [name for name in tensors if not name.startswith("consolidated")]
    return [name for name in small if not name.endswith(".bin.index.json")] + (once or tensors)


def tokenizer_files(names: Sequence[str], code: bool = False) -> list[str]:
    suffixes = (*_SMALL, ".py") if code else _SMALL
    return [name for name in names if "/" not in name and name.endswith(suffixes)]


MODEL = Kind(model_files, (("config.json",), ("*.safetensors", "pytorch_model*.bin")))
TOKENIZER = Kind(tokenizer_files, (("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),))


def fetch(repo: Repo, kind: Kind, code: bool = False) -> Path:
    """Returns the directory with the files, from the cache alone where the hub can't be reached.

    Raises ValueError saying what to do.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _cached(repo, kind, "HF_HUB_OFFLINE is set")
    try:
        info = hub.HfApi().model_info(repo.name, revision=repo.revision, timeout=_TIMEOUT)
    except Exception as error:  # the hub client raises its own, its HTTP library's and OS errors
        if _answered(error):
            raise _refusal(repo, error) from None
        return _cached(repo, kind, f"the hub can't be reached ({_reason(error)})")
    files = kind.files([sibling.rfilename for sibling in info.siblings or ()], code)
    if lacking := kind.lacks(files):
        raise ValueError(f"{repo.flag}: the hub's {repo} has no {', and no '.join(lacking)}")
    download = functools.partial(hub.snapshot_download, revision=repo.revision, cache_dir=repo.cache)
    try:
        return Path(download(repo.name, allow_patterns=files))
    except Exception as error:
        raise _refusal(repo, error) from None


def fetch_file(repo: Repo, name: str) -> Path:
    """Returns one file of a repository, like ``fetch``."""

    def files(names: Sequence[str], code: bool = False) -> list[str]:
        return [name] if name in names else []

    return fetch(repo, Kind(files, ((name,),))) / name


def _cached(repo: Repo, kind: Kind, why: str) -> Path:
    from huggingface_hub import constants, try_to_load_from_cache

    for name in kind.needs[0]:
        found = try_to_load_from_cache(repo.name, name, cache_dir=repo.cache, revision=repo.revision)
        if isinstance(found, str):
            directory = Path(found).parents[name.count("/")]
            if lacking := _incomplete(directory, kind):
                raise _absent(repo, f"its copy in the cache has no {', and no '.join(lacking)}", why)
            return directory
    place = repo.cache or constants.HF_HUB_CACHE
    raise _absent(repo, f"no directory here and not in the cache {place}", why)


def _incomplete(directory: Path, kind: Kind) -> list[str]:
    """What an interrupted download did not bring."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    shards: set[str] = set()
    for index in directory.glob("model.safetensors.index.json") if kind is MODEL else ():
        shards |= set(json.loads(index.read_text()).get("weight_map", {}).values())
    return [*kind.lacks(names), *sorted(shards - set(names))]


def _absent(repo: Repo, what: str, why: str) -> ValueError:
    return ValueError(f"{repo.flag}: {repo}: {what}, and {why}: run once with a network, or {_ELSEWHERE}")


def _answered(error: Exception) -> bool:
    """Whether the hub said no, rather than nothing. Its failures (5xx) are nothing."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return getattr(error.response, "status_code", 0) < 500
    return isinstance(error, HFValidationError)


def _refusal(repo: Repo, error: Exception) -> ValueError:
    from huggingface_hub import errors

    flag, log_in = repo.flag, "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        said = f"{repo.name} is gated: accept its terms on its page of the hub, then {log_in}"
    elif isinstance(error, errors.RevisionNotFoundError):
        flag, said = repo.revision_flag, f"{repo.name} has no revision {repo.revision}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        said = f"{repo.name} is no directory here and not on the hub: check the name; if private, {log_in}"
    elif isinstance(error, OSError) and error.errno in _STORAGE:
        said = f"{repo} can't be stored: {_reason(error)}; --download-dir names another place"
    else:
        said = f"{repo} can't be had from the hub: {_reason(error)}; run again to resume, or {_ELSEWHERE}"
    return ValueError(f"{flag}: {said}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
