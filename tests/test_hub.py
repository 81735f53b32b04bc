"""Models, drafts and token maps from the hub: which files are fetched, and the errors if they are unavailable."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from specserve.config import Settings, hub, resolve_paths
from specserve.models.tensor_files import weight_files
from tests.hub_cache import cache_repository

LLAMA = [
    ".gitattributes", "LICENSE.md", "README.md", "USE_POLICY.md", "config.json", "generation_config.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "original/consolidated.00.pth", "original/params.json", "pytorch_model-00001-of-00001.bin",
    "pytorch_model.bin.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "modeling_custom.py", "onnx/model.onnx", "training_args.bin",
]  # fmt: skip
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SMALL = [
    "config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json",
]  # fmt: skip


def index_of(*shards: str) -> str:
    return json.dumps({"weight_map": dict(enumerate(shards))})


class FakeHub:
    """Two functions of huggingface_hub: the contents of a repository, and its files."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, list[str]] = {}
        self.fetched: list[tuple[str, str | None, str | None, list[str]]] = []
        self.refuses: Exception | None = None
        self.breaks: Exception | None = None
        self.texts = {"model.safetensors.index.json": index_of(*WEIGHTS)}
        self._path = path
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repo: str, *, revision: str | None, timeout: float) -> Any:
        if self.refuses is not None:
            raise self.refuses
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files[repo]])

    def snapshot_download(
        self, repo: str, *, revision: str | None, cache_dir: str | None, allow_patterns: list[str]
    ) -> str:
        if self.breaks is not None:
            raise self.breaks
        self.fetched.append((repo, revision, cache_dir, allow_patterns))
        path = self._path / repo
        path.mkdir(parents=True, exist_ok=True)
        for name in set(allow_patterns) & set(self.texts):
            (path / name).write_text(self.texts[name])
        return str(path)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    found = FakeHub(tmp_path / "hub", monkeypatch)
    found.files = {
        "org/Model-1.0": LLAMA,
        "org/draft": ["README.md", "config.json", "pytorch_model.bin"],
        "org/maps": ["freq_32768.pt", "sub/freq_8192.pt"],
        "org/empty": ["README.md", "model.gguf"],
    }
    return found


def answer(kind: type[errors.HfHubHTTPError], status: int = 404) -> errors.HfHubHTTPError:
    return kind("words of the hub", response=SimpleNamespace(status_code=status, headers={}, request=None))  # type: ignore[arg-type]


def test_only_what_is_needed_is_fetched() -> None:
    index = "model.safetensors.index.json"
    assert set(hub.model_files(LLAMA)) == {*SMALL, index}, "the weights are those that the index names"
    assert set(hub.model_files(LLAMA, code=True)) == {*SMALL, index, "modeling_custom.py"}
    assert set(hub.model_files([*LLAMA, "mtp.safetensors"])) == {*SMALL, index, "mtp.safetensors"}
    pickles = [name for name in LLAMA if "safetensors" not in name]
    assert set(hub.model_files(pickles)) == {*SMALL, "pytorch_model.bin.index.json"}


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        (
            ["model.safetensors", "mtp.safetensors", "onnx/mtp.safetensors"],
            ["model.safetensors", "mtp.safetensors"],
        ),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["consolidated.safetensors", "draft.safetensors"], ["draft.safetensors"]),
        (["adapter_model.safetensors", "model.fp32.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"], ["model.safetensors"]),
        (["adapter_model.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["onnx/model.safetensors", "pytorch_model-00001-of-00002.bin", "training_args.bin"], []),
    ],
)
def test_the_weights_that_the_loader_reads(names: list[str], weights: list[str], tmp_path: Path) -> None:
    assert hub.model_files(["config.json", *names]) == ["config.json", *weights]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if weights and "pytorch_model.bin.index.json" not in names and "draft.safetensors" not in names:
        assert [file.name for file in weight_files(tmp_path)[0]] == weights


def test_no_bar_becomes_a_part_of_a_log(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    bars = importlib.import_module("huggingface_hub.utils.tqdm")  # whose name is also a class's
    monkeypatch.setattr(bars, "disable_progress_bars", lambda: seen.append(True))
    fake.files["o/m"] = LLAMA
    for in_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda in_terminal=in_terminal: in_terminal)
        resolve_paths(Settings(model_path="o/m"))
        assert bool(seen) != in_terminal


def test_shards_are_those_of_the_index(fake: FakeHub) -> None:
    fake.files["org/sharded"] = [
        "config.json", "a.safetensors", "adapter_model.safetensors", "b/c.safetensors",
        "model.safetensors.index.json", "pytorch_model.bin",
    ]  # fmt: skip
    fake.texts["model.safetensors.index.json"] = index_of("b/c.safetensors", "a.safetensors", "a.safetensors")
    resolve_paths(Settings(model_path="org/sharded"))
    index, found = (set(files) for *_, files in fake.fetched)
    assert index == {"model.safetensors.index.json"}
    assert found == {"config.json", "model.safetensors.index.json", "a.safetensors", "b/c.safetensors"}
    fake.texts["model.safetensors.index.json"] = index_of("a.safetensors", "../d.safetensors")
    with pytest.raises(ValueError, match=r"--model-path: the hub's org/sharded has no \.\./d\.safetensors"):
        resolve_paths(Settings(model_path="org/sharded"))


def test_model_draft_tokenizer_and_map(fake: FakeHub, tmp_path: Path) -> None:
    given = Settings(
        model_path="org/Model-1.0", revision="v2", tokenizer_path="org/Model-1.0", download_dir="/cache",
        speculative_algorithm="EAGLE", speculative_draft_model_path="org/draft",
        speculative_draft_model_revision="beef", speculative_token_map="org/maps/sub/freq_8192.pt",
    )  # fmt: skip
    found, notes = resolve_paths(given)
    (index, model, tokenizer, draft, map_) = fake.fetched
    assert index == ("org/Model-1.0", "v2", "/cache", ["model.safetensors.index.json"])
    assert model[:3] == tokenizer[:3] == ("org/Model-1.0", "v2", "/cache")
    assert set(model[3]) == {*SMALL, *WEIGHTS, "model.safetensors.index.json"}
    assert not any(name.endswith(".safetensors") for name in tokenizer[3])
    assert draft == ("org/draft", "beef", "/cache", ["config.json", "pytorch_model.bin"])
    assert map_ == ("org/maps", None, "/cache", ["sub/freq_8192.pt"])
    assert found.model_path == str(tmp_path / "hub/org/Model-1.0")
    assert found.speculative_token_map == str(tmp_path / "hub/org/maps/sub/freq_8192.pt")
    assert found.served_model_name == ("Model-1.0", "org/Model-1.0")
    assert [note.split(" = ")[0] for note in notes] == [
        "model_path", "tokenizer_path", "speculative_draft_model_path", "speculative_token_map",
    ]  # fmt: skip
    assert "the hub's org/draft at revision beef" in [*notes][2]
    Path(found.speculative_token_map).parent.mkdir(parents=True)
    Path(found.speculative_token_map).touch()
    assert resolve_paths(found) == (found, {}), "what is local is not asked for again"


def test_flags_of_the_hub_where_all_is_local(tmp_path: Path) -> None:
    unread = {"download_dir": "/cache", "speculative_draft_model_revision": "v1"}
    found, notes = resolve_paths(Settings(model_path=str(tmp_path), revision="main", **unread))
    assert [*notes] == [
        f"--revision has no effect: {tmp_path} is a local directory",
        "--speculative-draft-model-revision has no effect: no draft is downloaded",
        "--download-dir has no effect: all files are local",
    ]
    assert resolve_paths(found) == (found, {})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (answer(errors.RepositoryNotFoundError, 401), "--model-path: org/Model-1.0 is neither a local directory"),
        (answer(errors.GatedRepoError, 403), "--model-path: org/Model-1.0 is gated: accept its terms on its page"),
        (answer(errors.GatedRepoError, 403), "log in with `hf auth login` or set HF_TOKEN"),
        (answer(errors.RevisionNotFoundError), "--revision: org/Model-1.0 has no revision v9"),
        (answer(errors.HfHubHTTPError, 429), "can't be downloaded from the hub: words of the hub"),
        (answer(errors.HfHubHTTPError, 502), "can't be reached (words of the hub): run once with a network"),
        (OSError("no route\nto host"), "the hub can't be reached (no route to host): run once with a network"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(fake: FakeHub, error: Exception, words: str, tmp_path: Path) -> None:
    fake.refuses = error
    with pytest.raises(ValueError, match=r"^--") as told:
        resolve_paths(Settings(model_path="org/Model-1.0", revision="v9", download_dir=str(tmp_path)))
    assert words in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), "can't be stored: .*--download-dir names another place"),
        (RuntimeError("connection reset"), "connection reset; run again to resume"),
        (answer(errors.GatedRepoError, 403), "--model-path: org/Model-1.0 is gated: accept its terms"),
    ],
)
def test_a_download_that_breaks(fake: FakeHub, error: Exception, words: str) -> None:
    fake.breaks = error
    with pytest.raises(ValueError, match=words):
        resolve_paths(Settings(model_path="org/Model-1.0"))


def test_a_repository_without_a_model(fake: FakeHub) -> None:
    with pytest.raises(ValueError, match=r"hub's org/empty has no config\.json, and no \*\.safetensors or"):
        resolve_paths(Settings(model_path="org/empty"))
    bad = Settings(
        model_path="org/draft", speculative_algorithm="EAGLE", speculative_draft_model_path="org/draft",
        speculative_token_map="org/maps/freq_1.pt",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"--speculative-token-map: the hub's org/maps has no freq_1\.pt"):
        resolve_paths(bad)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out."""
    source, path = tmp_path / "source", tmp_path / "cache"
    for name in ("config.json", "model.safetensors", "maps/freq.pt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    cache_repository(path, "org/Model-1.0", source)
    return path


def offline(cache: Path, **settings: Any) -> Settings:
    return resolve_paths(Settings(download_dir=str(cache), **settings))[0]


def test_offline_mode_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = offline(cache, model_path="org/Model-1.0")
    snapshot = next((cache / "models--org--Model-1.0" / "snapshots").iterdir())
    assert found.model_path == str(snapshot)
    assert offline(cache, model_path="org/Model-1.0", revision=snapshot.name).model_path == str(snapshot)
    given = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "org/Model-1.0"}
    mapped = offline(
        cache, model_path="org/Model-1.0", speculative_token_map="org/Model-1.0/maps/freq.pt", **given
    )
    assert mapped.speculative_token_map == str(snapshot / "maps/freq.pt")
    with pytest.raises(
        ValueError, match=r"org/Other: neither a local directory nor in the cache .* HF_HUB_OFFLINE is"
    ):
        offline(cache, model_path="org/Other")
    with pytest.raises(
        ValueError, match=r"Model-1\.0 at revision v3: neither a local directory nor in the cache"
    ):
        offline(cache, model_path="org/Model-1.0", revision="v3")


def test_a_copy_without_weights_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = next((cache / "models--org--Model-1.0" / "snapshots").iterdir())
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"its copy in the cache has no \*\.safetensors or"):
        offline(cache, model_path="org/Model-1.0")
    (snapshot / "model-1.safetensors").touch()
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (snapshot / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        ValueError, match=r"its copy in the cache has no model-2\.safetensors, and HF_HUB_OFFLINE"
    ):
        offline(cache, model_path="org/Model-1.0")


@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
def test_a_copy_with_a_damaged_index(cache: Path, monkeypatch: pytest.MonkeyPatch, stem: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = next((cache / "models--org--Model-1.0" / "snapshots").iterdir())
    (snapshot / "model.safetensors").unlink()
    index, shard = snapshot / f"{stem}.index.json", f"pytorch_model-1.{stem.split('.')[1]}"
    (snapshot / shard).touch()
    index.write_text(index_of(shard))
    assert offline(cache, model_path="org/Model-1.0").model_path == str(snapshot)
    index.write_text(index_of(shard, "pytorch_model-2"))
    with pytest.raises(ValueError, match="its copy in the cache has no pytorch_model-2, and HF_HUB_OFFLINE"):
        offline(cache, model_path="org/Model-1.0")
    for text in ('{"weight_map": {"a": ', "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"^--model-path: org/Model-1\.0: ") as told:
            offline(cache, model_path="org/Model-1.0")
        assert str(index) in str(told.value)
        assert type(told.value) is ValueError


def test_no_tokenizer_is_fetched_that_is_not_read(fake: FakeHub, tmp_path: Path) -> None:
    for tokenizer in ("org/Model-1.0", "/no/where"):
        fake.fetched.clear()
        given = Settings(
            model_path=str(tmp_path),
            tokenizer_path=tokenizer,
            skip_tokenizer_init=True,
            trust_remote_code=True,
        )
        found, notes = resolve_paths(given)
        assert fake.fetched == []
        why = "has no effect: --skip-tokenizer-init loads no tokenizer"
        assert [*notes] == [f"--trust-remote-code {why}", f"--tokenizer-path {why}"]
        assert (found.tokenizer_path, found.trust_remote_code) == (str(tmp_path), False)
        assert resolve_paths(found) == (found, {})
    fake.files["org/Model-1.0"] = ["config.json", "model.safetensors", "modeling_custom.py"]
    resolve_paths(Settings(model_path="org/Model-1.0", skip_tokenizer_init=True, trust_remote_code=True))
    assert fake.fetched[-1][3] == ["config.json", "model.safetensors"]
    resolve_paths(Settings(model_path="org/Model-1.0", skip_tokenizer_init=True, load_format="dummy"))
    assert fake.fetched[-1][3] == ["config.json"]
    assert resolve_paths(Settings(model_path=str(tmp_path), skip_tokenizer_init=True))[1] == {}


def test_without_a_network_the_cache_serves(fake: FakeHub, cache: Path) -> None:
    fake.refuses = OSError("no network")
    assert offline(cache, model_path="org/Model-1.0").model_path is not None
    assert fake.fetched == []
