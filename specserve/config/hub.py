"""Fetch repositories from the Hugging Face hub, or find them in its cache.

huggingface_hub caches, resumes, shows progress and handles access tokens; it reads HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_TIMEOUT = 10.0  # seconds to wait for the hub before falling back to the cache
_SMALL = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_ELSEWHERE = "`hf download` it elsewhere and give its directory"
_STEMS = ("model.safetensors", "pytorch_model.bin")  # in the order in which the loader looks for them
_HEADS = "_lm_head.pt"  # of Medusa and similar drafts
_INDEX = ".index.json"
_OWN = "*mtp*.safetensors"  # of a layer that drafts, which an index may lack
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository and the flag that names it. ``revision`` None is the main branch, ``cache`` None the default."""

    flag: str
    name: str
    revision: str | None = None
    revision_flag: str = "--revision"
    cache: str | None = None

    def __str__(self) -> str:
        return self.name + (f" at revision {self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class Kind:
    """A use of a repository. ``files`` returns which of its files to fetch; its second argument adds the Python files
    that --trust-remote-code runs. ``needs``: groups of patterns; each group must match a file. The first group has
    plain names, by which a cached copy is found."""

    files: Callable[[Sequence[str], bool], list[str]]
    needs: Sequence[Sequence[str]]

    def lacks(self, names: Sequence[str]) -> list[str]:
        """Return a description of each group that no name matches."""
        return [
            " or ".join(group)
            for group in self.needs
            if not any(fnmatch.filter(names, pattern) for pattern in group)
        ]


def is_id(given: str) -> bool:
    return _ID.fullmatch(given) is not None


def model_files(names: Sequence[str], code: bool = False) -> list[str]:
    """Return the files of a model or draft: configuration, tokenizer, and the weights that the loader reads, or their
    index and those that it may lack."""
    index = _index(names)
    small = [n for n in tokenizer_files(names, code) if n == index or not n.endswith(f".bin{_INDEX}")]
    own = [name for name in fnmatch.filter(names, _OWN) if "/" not in name]
    return list(dict.fromkeys([*small, *([] if index else _weights(names)), *own]))


def _index(names: Sequence[str]) -> str | None:
    """Return the index that the loader reads, if the weights are not in one file."""
    for stem in _STEMS:
        if stem + _INDEX in names:
            return stem + _INDEX
        if stem in names:
            return None
    return None


def _weights(names: Sequence[str]) -> list[str]:
    """Return the weight files of a repository without an index: one file, or else all that the loader finds.
    ``consolidated`` files contain the same weights under other names."""
    for stem in _STEMS:
        if stem in names:
            return [stem]
    found = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    pickled = [name for name in names if "/" not in name and name.endswith(_HEADS)]
    return [name for name in found if not name.startswith("consolidated")] or found or pickled


def tokenizer_files(names: Sequence[str], code: bool = False) -> list[str]:
    suffixes = (*_SMALL, ".py") if code else _SMALL
    return [name for name in names if "/" not in name and name.endswith(suffixes)]


MODEL = Kind(model_files, (("config.json",), ("*.safetensors", "pytorch_model*.bin", f"*{_HEADS}")))
SHAPE = Kind(tokenizer_files, (("config.json",),))
TOKENIZER = Kind(tokenizer_files, (("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),))


def fetch(repo: Repo, kind: Kind, code: bool = False) -> Path:
    """Return the directory with the files, from the cache alone if the hub can't be reached. Raises ValueError saying
    what to do."""
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if constants.HF_HUB_OFFLINE:
        return _cached(repo, kind, "HF_HUB_OFFLINE is set")
    if not sys.stderr.isatty():
        disable_progress_bars()  # lines of the log would begin with them
    try:
        info = hub.HfApi().model_info(repo.name, revision=repo.revision, timeout=_TIMEOUT)
    except Exception as error:  # the client raises its own types, its HTTP library's and OSError
        if _answered(error):
            raise _refusal(repo, error) from None
        return _cached(repo, kind, f"the hub can't be reached ({_reason(error)})")

    def download(files: Sequence[str]) -> Path:
        ask = functools.partial(hub.snapshot_download, revision=repo.revision, cache_dir=repo.cache)
        try:
            return Path(ask(repo.name, allow_patterns=list(files)))
        except Exception as error:
            raise _refusal(repo, error) from None

    names = [sibling.rfilename for sibling in info.siblings or ()]
    files, lacking = _plan(repo, kind, names, lambda index: download([index]) / index, code)
    if lacking:
        raise ValueError(f"{repo.flag}: the hub's {repo} has no {', and no '.join(lacking)}")
    return download(files)


def _plan(
    repo: Repo, kind: Kind, names: Sequence[str], get: Callable[[str], Path], code: bool = False
) -> tuple[list[str], list[str]]:
    """Return the needed files, and those that ``names`` lacks. ``get`` returns the path of the index of sharded
    weights."""
    files = kind.files(names, code)
    index = _index(files) if kind is MODEL else None
    if index is not None:
        files += _shards(repo, get(index))
    return files, [*kind.lacks(files), *sorted(set(files) - set(names))]


def _shards(repo: Repo, index: Path) -> list[str]:
    """Return the files that an index names. Raises ValueError for a malformed index."""
    try:
        fields = json.loads(index.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{repo.flag}: {repo}: {index} is not a readable JSON file: {_reason(error)}; delete {index.resolve()} "
            "and run with a network"
        ) from None
    shards = fields.get("weight_map") if isinstance(fields, dict) else None
    named = list(shards.values()) if isinstance(shards, dict) else []
    if not named or not all(isinstance(name, str) for name in named):
        raise ValueError(f"{repo.flag}: {repo}: {index}: weight_map must name a file for each tensor")
    return sorted(set(named))


def fetch_file(repo: Repo, name: str) -> Path:
    """Return the path of one file of a repository, fetched like ``fetch``."""
    kind = Kind(lambda names, _: [name] if name in names else [], ((name,),))
    return fetch(repo, kind) / name


def _cached(repo: Repo, kind: Kind, why: str) -> Path:
    from huggingface_hub import constants, try_to_load_from_cache

    for name in kind.needs[0]:
        found = try_to_load_from_cache(repo.name, name, cache_dir=repo.cache, revision=repo.revision)
        if isinstance(found, str):
            directory = Path(found).parents[name.count("/")]
            if lacking := _incomplete(directory, repo, kind):
                raise _absent(repo, f"its copy in the cache has no {', and no '.join(lacking)}", why)
            return directory
    place = repo.cache or constants.HF_HUB_CACHE
    raise _absent(repo, f"neither a local directory nor in the cache {place}", why)


def _incomplete(directory: Path, repo: Repo, kind: Kind) -> list[str]:
    """Return what an interrupted download lacks."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    return _plan(repo, kind, names, directory.joinpath)[1]


def _absent(repo: Repo, what: str, why: str) -> ValueError:
    return ValueError(f"{repo.flag}: {repo}: {what}, and {why}: run once with a network, or {_ELSEWHERE}")


def _answered(error: Exception) -> bool:
    """Return whether the hub refused, rather than failed to answer (5xx, no connection)."""
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
        said = (
            f"{repo.name} is neither a local directory nor on the hub: check the name; if private, {log_in}"
        )
    elif isinstance(error, OSError) and error.errno in _STORAGE:
        said = f"{repo} can't be stored: {_reason(error)}; --download-dir names another place"
    else:
        said = (
            f"{repo} can't be downloaded from the hub: {_reason(error)}; run again to resume, or {_ELSEWHERE}"
        )
    return ValueError(f"{flag}: {said}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
