"""Small checkpoints that several tests serve, made once per run, and where kernels are tested."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tokenizers
import torch
from torch import Tensor

from specserve.config.paths import BUNDLED_MODEL
from tests.engines import Checkpoints
from tests.reference.arctic_lstm import make_arctic_lstm
from tests.reference.block import make_block
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.hydra import make_hydra
from tests.reference.medusa import make_medusa
from tests.reference.mlp_speculator import make_mlp_speculator
from tests.reference.models import load_checkpoint, make_llama, make_qwen2, save_checkpoint
from tests.reference.p_eagle import make_p_eagle
from tests.reference.quantized import WIDE, quantize
from tests.reference.redrafter import make_redrafter
from tests.reference.standalone import first_layer, make_pard

Quantized = Callable[[str], Path]
"""A checkpoint's directory, by dialect."""


def _agreeing(path: Path, target: Path, rank: int, **heads: int) -> Checkpoints:
    """Drafts of all methods that often say what the target says. ``rank``: a Markov head's width."""
    drawn: dict[str, Any] = {"agree": True, **heads}
    block: dict[str, Any] = {"agree": True, "heads": heads.get("heads", 4)}
    eagle = make_eagle(path / "eagle", target, **drawn)
    eagle3 = make_eagle3(path / "eagle3", target, draft_vocab=40, **drawn)
    others = {
        "MEDUSA": make_medusa(path / "medusa", target, agree=True),
        "MLP_SPECULATOR": make_mlp_speculator(path / "mlp_speculator", target, agree=True),
        "DFLASH": make_block(path / "dflash", target, **block),
        "DSPARK": make_block(
            path / "dspark", target, dialect="DeepSpec", markov_kind="vanilla", rank=rank, **block
        ),
        "DOMINO": make_block(path / "domino", target, dialect="SpecForge", domino_shift=True, **block),
        "DFLASH2": make_block(path / "dflash2", target, selected=8, **block),
        "HYDRA": make_hydra(path / "hydra", target, agree=True),
        "ARCTIC_LSTM": make_arctic_lstm(path / "arctic_lstm", target, agree=True),
        "REDRAFTER": make_redrafter(path / "redrafter", target, agree=True),
        "STANDALONE": first_layer(path / "standalone", target),
        "PARD": make_pard(path / "pard", path / "standalone", mask=63),
        "P_EAGLE": make_p_eagle(path / "p_eagle", target, layers=2, agree=True),
    }
    return Checkpoints(target, eagle, eagle3, others)


GPU = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param(("cuda", dtype), id=f"cuda-{str(dtype)[6:]}", marks=pytest.mark.gpu)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    if GPU
    else [pytest.param(("cpu", torch.float32), id="cpu-float32")]
)
def draw(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Draws normal tensors of the device and dtype under test."""
    device, dtype = request.param
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)


@pytest.fixture(
    params=["cpu"]
    if os.environ.get("TRITON_INTERPRET") == "1"
    else [pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    """The device under test, for tests of indices and masks, which have one type."""
    return str(request.param)


class InTurn:
    """In the place of the threads that load weights, which take longer to start than a tiny model to load."""

    map = staticmethod(map)

    def __init__(self, *given: Any) -> None:
        pass

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def weights_are_loaded_in_turn() -> Iterator[None]:
    """Except by processes of their own, and in ``tests/test_weight_loading.py``."""
    with patch("specserve.models.checkpoint.ThreadPoolExecutor", InTurn):
        yield


@pytest.fixture(scope="session", autouse=True)
def steps_are_measured_once() -> Iterator[None]:
    """At an engine's start, and only the steps from which all others are estimated: few tests need good ones."""
    with patch.multiple("specserve.engine.profile", EAGER_REPEATS=1, EAGER_SECONDS=0.0):
        yield


@pytest.fixture(scope="session")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A target that is nearly a table of next tokens, and drafts that often say what it says."""
    path = tmp_path_factory.mktemp("agreeing")
    return _agreeing(path, make_llama(path / "target", layers=2, branch_scale=0.04), rank=24)


@pytest.fixture(scope="session")
def agreeing_32(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The same with heads of 32, the smallest that the kernels take."""
    path = tmp_path_factory.mktemp("agreeing_32")
    target = make_llama(
        path / "target", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, branch_scale=0.12
    )
    return _agreeing(path, target, rank=48, heads=2, kv_heads=1)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in 16 bits, which is quantized in published dialects."""
    return make_qwen2(tmp_path_factory.mktemp("plain") / "target", **WIDE, std=0.08, branch_scale=0.1)


@pytest.fixture(scope="session")
def dialects(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """``plain`` in a dialect, made once."""
    path = tmp_path_factory.mktemp("dialects")
    return cache(lambda dialect: quantize(plain, path / dialect.replace(" ", "_"), dialect))


@pytest.fixture
def quantized(dialects: Quantized, tmp_path: Path) -> Quantized:
    """A copy, which may be changed."""
    return lambda dialect: shutil.copytree(dialects(dialect), tmp_path / "target")


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Nothing agrees, and every output depends on all features and all of the cache."""
    path = tmp_path_factory.mktemp("random")
    target = make_llama(path / "target")
    eagle = make_eagle(path / "eagle", target, fc_bias=True, qkv_bias=True)
    eagle3 = make_eagle3(path / "eagle3", target, draft_vocab=24, rope_theta=500.0)
    return Checkpoints(target, eagle, eagle3, {"DFLASH": make_block(path / "dflash", target)})


@pytest.fixture(scope="session")
def small_chat(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A random target behind the bundled model's tokenizer and template, at a tenth of its cost, and drafts. It writes
    whole characters, and no end."""
    path = tmp_path_factory.mktemp("small_chat")
    target = make_llama(path / "target", vocab=4096, hidden=64, inner=64, layers=2, eos=1, branch_scale=0.3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).symlink_to(BUNDLED_MODEL / name)
    state, config = load_checkpoint(target)
    text_of = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json")).decode
    state["lm_head.weight"][[text_of([token]).strip("\ufffd") == "" for token in range(4096)]] = 0
    save_checkpoint(target, state, config, safetensors=True)
    eagle = make_eagle(path / "eagle", target, agree=True)
    return Checkpoints(target, eagle, make_eagle3(path / "eagle3", target, agree=True))
