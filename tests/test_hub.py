"""Models, drafts and token maps of the hub: what is fetched, from where, and what is said when it can't be had."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from specserve.config import Settings, hub, resolve_paths
from tests.hub_cache import cache_repository

LLAMA = [
    ".gitattributes", "LICENSE.md", "README.md", "USE_POLICY.md", "config.json", "generation_config.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "original/consolidated.00.pth", "original/params.json", "pytorch_model-00001-of-00001.bin",
    "pytorch_model.bin.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "modeling_custom.py", "onnx/model.onnx", "training_args.bin",
]  # fmt: skip
SMALL = [
    "config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json",
]  # fmt: skip


class FakeHub:
    """huggingface_hub's two calls: what is in a repository, and its files."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, list[str]] = {}
        self.fetched: list[tuple[str, str | None, str | None, list[str]]] = []
        self.refuses: Exception | None = None
        self.breaks: Exception | None = None
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
    weights = [name for name in LLAMA if name.startswith("model") and "safetensors" in name]
    assert set(hub.model_files(LLAMA)) == {*SMALL, *weights}
    assert set(hub.model_files(LLAMA, code=True)) == {*SMALL, *weights, "modeling_custom.py"}
    pickles = [name for name in LLAMA if "safetensors" not in name]
    bins = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    assert set(hub.model_files(pickles)) == {*SMALL, *bins}
    twice = ["config.json", "consolidated.safetensors", "model.safetensors"]
    assert set(hub.model_files(twice)) == {"config.json", "model.safetensors"}
    assert set(hub.model_files(twice[:2])) == set(twice[:2])


def test_model_draft_tokenizer_and_map(fake: FakeHub, tmp_path: Path) -> None:
    given = Settings(
        model_path="org/Model-1.0", revision="v2", tokenizer_path="org/Model-1.0", download_dir="/cache",
        speculative_algorithm="EAGLE", speculative_draft_model_path="org/draft",
        speculative_draft_model_revision="beef", speculative_token_map="org/maps/sub/freq_8192.pt",
    )  # fmt: skip
    found, notes = resolve_paths(given)
    (model, tokenizer, draft, map_) = fake.fetched
    assert model[:3] == tokenizer[:3] == ("org/Model-1.0", "v2", "/cache")
    assert "model-00001-of-00002.safetensors" in model[3]
    assert not any(name.endswith(".safetensors") for name in tokenizer[3])
    assert draft == ("org/draft", "beef", "/cache", ["config.json", "pytorch_model.bin"])
    assert map_ == ("org/maps", None, "/cache", ["sub/freq_8192.pt"])
    assert found.model_path == str(tmp_path / "hub/org/Model-1.0")
    assert found.speculative_token_map == str(tmp_path / "hub/org/maps/sub/freq_8192.pt")
    assert found.served_model_name == ("Model-1.0", "org/Model-1.0")
    assert [note.split(" = ")[0] for note in notes] == [
        "model_path", "tokenizer_path", "speculative_draft_model_path", "speculative_token_map",
    ]  # fmt: skip
    assert "the hub's org/draft at revision beef" in notes[2]
    Path(found.speculative_token_map).parent.mkdir(parents=True)
    Path(found.speculative_token_map).touch()
    assert resolve_paths(found) == (found, []), "what is local is not asked for again"


def test_a_revision_of_a_directory(tmp_path: Path) -> None:
    found, notes = resolve_paths(Settings(model_path=str(tmp_path), revision="main"))
    assert notes == [f"--revision changes nothing: {tmp_path} is a directory, not the hub's"]
    assert resolve_paths(found) == (found, [])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (answer(errors.RepositoryNotFoundError, 401), "--model-path: org/Model-1.0 is no directory here and not on"),
        (answer(errors.GatedRepoError, 403), "--model-path: org/Model-1.0 is gated: accept its terms on its page"),
        (answer(errors.GatedRepoError, 403), "log in with `hf auth login` or set HF_TOKEN"),
        (answer(errors.RevisionNotFoundError), "--revision: org/Model-1.0 has no revision v9"),
        (answer(errors.HfHubHTTPError, 429), "can't be had from the hub: words of the hub"),
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
        ValueError, match=r"org/Other: no directory here and not in the cache .* HF_HUB_OFFLINE is"
    ):
        offline(cache, model_path="org/Other")
    with pytest.raises(
        ValueError, match=r"Model-1\.0 at revision v3: no directory here and not in the cache"
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


def test_without_a_network_the_cache_serves(fake: FakeHub, cache: Path) -> None:
    fake.refuses = OSError("no network")
    assert offline(cache, model_path="org/Model-1.0").model_path is not None
    assert fake.fetched == []
