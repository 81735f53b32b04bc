"""Find the files that a server uses: the bundled model, a local directory or a download from the hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specserve.config import hub
from specserve.config.choices import DUMMY
from specserve.config.notes import CHOSEN, UNUSED, Notes
from specserve.config.settings import SETTINGS, Settings
from specserve.config.speculation import DYNAMIC
from specserve.methods import METHOD_NAMES, carries_draft, fitting, method_of

BUNDLED = Path(__file__).parent.parent / "bundled"
BUNDLED_MODEL = BUNDLED / "chat"
BUNDLED_DRAFTS = {
    name: BUNDLED / method.bundled
    for name in METHOD_NAMES
    if (method := method_of(name)) is not None and method.bundled is not None
}
BUNDLED_NAME = "specserve-chat"

_DRAFT_FLAG = "--speculative-draft-model-path"
_DRAFT_REVISION = "--speculative-draft-model-revision"
_OF_TOKENIZER = ("trust_remote_code", "chat_template", "tool_call_parser", "reasoning_parser")
_UNREAD = ": --skip-tokenizer-init loads no tokenizer"


_GGUF = (
    "GGUF files are not read; convert one with Transformers and its gguf package: AutoModelForCausalLM and "
    "AutoTokenizer from_pretrained(DIR, gguf_file=NAME), each with save_pretrained(OUTPUT)"
)
_FOREIGN = {
    "*.gguf": _GGUF,
    "adapter_config.json": "adapters are not read; merge it into its base model, with peft: merge_and_unload() and "
    "save_pretrained(OUTPUT)",
    "params.json": "Mistral's own files are not read; the hub has most of its models for Transformers too, with a "
    "config.json",
}
"""What else a directory without a config.json may hold, by a file in it."""


def resolve_paths(settings: Settings) -> tuple[Settings, Notes]:
    """Return a copy of the settings with local paths and a model name, and a note on each choice.

    Resolving a resolved copy changes nothing. Raises ValueError naming the flag, the path and what to do.
    """
    notes: Notes = {}
    if settings.skip_tokenizer_init:
        settings = settings.without(_OF_TOKENIZER, _UNREAD, notes)
    places = _Places(settings, notes, [])
    model = settings.model_path
    if model is None:
        model = str(BUNDLED_MODEL)
        notes[f"model_path = {model}: none was given, serving the bundled model"] = CHOSEN
    model_path = places.directory("--model-path", model, settings.revision)
    tokenizer, draft = _tokenizer(settings, model_path, places), _draft(settings, model_path, places)
    algorithm = settings.speculative_algorithm
    if draft is not None and settings.method is not None:
        named = fitting(algorithm, Path(draft))
        if named != algorithm:
            note = f"speculative_algorithm = {named}: the draft's model_type says so, not {algorithm}"
            notes[note] = CHOSEN
        algorithm = named
    resolved = replace(
        settings,
        model_path=str(model_path),
        revision=None,
        download_dir=None,
        tokenizer_path=tokenizer,
        served_model_name=settings.served_model_name or _names(model, model_path),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        speculative_draft_model_revision=None,
        speculative_token_map=_file("speculative_token_map", settings, places),
        speculative_token_map_start=_file("speculative_token_map_start", settings, places),
        speculative_datastore=_file("speculative_datastore", settings, places),
    )
    if not places.downloads:
        settings.without(["download_dir"], ": all files are local", notes)
    return resolved, notes


def _names(given: str, path: Path) -> tuple[str, ...]:
    if is_bundled(path):
        return (BUNDLED_NAME,)
    last = Path(given).name or path.resolve().name
    return (last,) if Path(given).expanduser().exists() else (last, given)


def _tokenizer(settings: Settings, model_path: Path, places: _Places) -> str:
    given = settings.tokenizer_path
    if given is None:
        return str(model_path)
    if settings.skip_tokenizer_init and given != str(model_path):
        settings.without(["tokenizer_path"], _UNREAD, places.notes)
    if settings.skip_tokenizer_init:
        return str(model_path)
    revision = settings.revision if given == settings.model_path else None
    return str(places.directory("--tokenizer-path", given, revision, kind=hub.TOKENIZER))


def _draft(settings: Settings, model_path: Path, places: _Places) -> str | None:
    draft, algorithm = settings.speculative_draft_model_path, settings.speculative_algorithm
    revision, method = settings.speculative_draft_model_revision, settings.method
    if draft is not None and method is not None and method.needs_draft:
        return str(places.directory(_DRAFT_FLAG, draft, revision, of=_DRAFT_REVISION))
    settings.without(["speculative_draft_model_revision"], ": no draft is downloaded", places.notes)
    if method is None:
        return draft
    if not method.needs_draft:
        settings.without(["speculative_draft_model_path"], f": {algorithm} has no checkpoint", places.notes)
        return None
    if carries_draft(algorithm, model_path):
        note = f"speculative_draft_model_path = {model_path}: the model's checkpoint has a draft head"
        places.notes[note] = CHOSEN
        return str(model_path)
    bundled = BUNDLED_DRAFTS.get(algorithm)
    if bundled is None or not is_bundled(model_path):
        raise ValueError(f"{_DRAFT_FLAG}: needed for --speculative-algorithm {algorithm} with {model_path}")
    note = f"speculative_draft_model_path = {bundled}: none was given, using the bundled draft"
    places.notes[note] = CHOSEN
    return str(places.directory(_DRAFT_FLAG, str(bundled), None))


def _file(name: str, settings: Settings, places: _Places) -> str | None:
    """Return the file of a setting: a local one, or ``organisation/repository/file`` of the hub. A dynamic token map
    has none."""
    flag = SETTINGS[name].flag
    given: str | None = getattr(settings, name)
    if given is None or settings.method is None:
        return given
    if (name, given) == ("speculative_token_map", DYNAMIC):
        return DYNAMIC
    path = Path(given).expanduser()
    if path.is_file():
        return str(path)
    parts = given.split("/", 2)
    if path.exists() or len(parts) < 3 or not hub.is_id("/".join(parts[:2])):
        raise ValueError(
            f"{flag}: {given} is neither a file nor a file of the hub such as org/name/freq_32768.pt"
        )
    repo = hub.Repo(flag, "/".join(parts[:2]), cache=settings.download_dir)
    places.downloads.append(str(repo))
    local = hub.fetch_file(repo, parts[2])
    places.notes[f"{name} = {local}: {parts[2]} of the hub's {repo}"] = CHOSEN
    return str(local)


@dataclass(frozen=True, slots=True)
class _Places:
    """Turn the paths and ids that flags give into directories. ``notes`` collects where each came from, ``downloads``
    those from the hub."""

    settings: Settings
    notes: Notes
    downloads: list[str]

    def directory(
        self,
        flag: str,
        given: str,
        revision: str | None,
        *,
        kind: hub.Kind = hub.MODEL,
        of: str = "--revision",
    ) -> Path:
        """Return the directory of ``given``. ``of``: the flag of the revision."""
        repo = hub.Repo(flag, given, revision, of, self.settings.download_dir)
        path = Path(repo.name).expanduser()
        if path.is_dir():
            found = [words for file, words in _FOREIGN.items() if any(path.glob(file))]
            if found and not (path / "config.json").exists():
                raise ValueError(f"{repo.flag}: {repo.name}: {found[0]}")
            if repo.revision is not None:
                self.notes[f"{repo.revision_flag} has no effect: {path} is a local directory"] = UNUSED
            return path
        if path.suffix == ".gguf":
            raise ValueError(f"{repo.flag}: {repo.name}: {_GGUF}")
        if path.exists():
            raise ValueError(f"{repo.flag}: {repo.name} is not a directory")
        if not hub.is_id(repo.name):
            raise ValueError(f"{repo.flag}: {repo.name} does not exist")
        self.downloads.append(str(repo))
        if kind is hub.MODEL and self.settings.load_format == DUMMY:
            kind = hub.SHAPE
        local = hub.fetch(repo, kind, code=self.settings.trust_remote_code)
        self.notes[f"{repo.flag[2:].replace('-', '_')} = {local}: the hub's {repo}"] = CHOSEN
        return local


def is_bundled(model: Path) -> bool:
    return model.resolve() == BUNDLED_MODEL.resolve()
