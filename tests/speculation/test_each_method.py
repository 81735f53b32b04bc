"""For every method: its drafts match a slow reference, no text changes, and a draft that fits is accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from torch import Tensor

from specserve.config.settings import Settings
from specserve.process.assemble import resolve_engine
from tests.engines import Checkpoints, Shape, answer_one, by_levels, drafting, make_scheduler, priced
from tests.reference import arctic_lstm, hydra, medusa, mlp_speculator, p_eagle, redrafter, standalone
from tests.reference.arctic_lstm import make_arctic_lstm
from tests.reference.block import make_block
from tests.reference.hydra import make_hydra
from tests.reference.medusa import make_medusa
from tests.reference.mlp_speculator import make_mlp_speculator
from tests.reference.models import LLAMA3_ROPE
from tests.reference.p_eagle import make_p_eagle
from tests.reference.redrafter import make_redrafter
from tests.reference.standalone import first_layer, make_pard, other_model
from tests.speculation.methods import (
    PROMPT,
    check_accepted,
    check_cached,
    check_drafts,
    check_texts,
    in_each_configuration,
    scheduler_of,
)
from tests.speculation.oracle import SAMPLING

CHAIN, LONG_CHAIN, TREE = (4, 1, 5), (6, 1, 7), (3, 3, 9)
MASK = 62


class Slow(NamedTuple):
    """``makes``: of a directory and the target. ``next_logits``: of the draft, the target, committed tokens and those
    drafted after them."""

    makes: dict[str, Callable[[Path, Path], Path]]
    next_logits: Callable[[Path, Path, tuple[int, ...], tuple[int, ...]], Tensor]
    shapes: tuple[Shape, Shape] = (CHAIN, TREE)
    chunk: int = 512


def each(make: Callable[..., Path], **kinds: dict[str, Any]) -> dict[str, Callable[[Path, Path], Path]]:
    return {kind.replace("_", " "): partial(make, **options) for kind, options in kinds.items()}


def pard(made: Callable[[Path, Path], Path], path: Path, target: Path) -> Path:
    return make_pard(path, made(path.parent / "plain", target), MASK)


STANDALONE: dict[str, Callable[[Path, Path], Path]] = {
    "another architecture": lambda path, target: other_model(path),
    "the first layer": first_layer,
}
SLOW: dict[str, Slow] = {
    "ARCTIC_LSTM": Slow(
        each(
            make_arctic_lstm,
            llama={},
            an_embedding_a_gate={"tied": False, "scale_input": False, "n_predict": 4},
            as_wide_as_the_target={"inner": 32},
        ),
        arctic_lstm.next_logits,
        ((3, 1, 4), TREE),
    ),
    "REDRAFTER": Slow(
        each(
            make_redrafter,
            recurrent={},
            summed={"rnn": False, "layers": 1},
            narrow={"exit_dim": 40, "layers": 1},
            without_blocks={"rnn": False, "layers": 0, "exit_dim": 72},
        ),
        redrafter.next_logits,
        (LONG_CHAIN, TREE),
    ),
    "MLP_SPECULATOR": Slow(
        each(
            make_mlp_speculator,
            llama={},
            scaled={"scale_input": True},
            tied={"tied": True, "scale_input": True},
            tied_and_as_often_as_used={"tied": True, "copies": True, "n_predict": 5},
            as_wide_as_the_target={"inner": 32, "n_predict": 5},
        ),
        mlp_speculator.next_logits,
    ),
    "HYDRA": Slow(
        each(
            make_hydra,
            with_a_layer={"blocks": 4},
            with_a_layer_and_1_block={"blocks": 1},
            of_1_block={"blocks": 1, "layered": False},
            of_4_blocks={"blocks": 4, "layered": False},
        ),
        hydra.next_logits,
        chunk=4,
    ),
    "MEDUSA": Slow(
        each(
            make_medusa,
            original={},
            two_blocks={"blocks": 2},
            safetensors={"layout": "original safetensors", "heads": 4},
            version_2={"layout": "version 2"},
            vllm={"layout": "vllm", "blocks": 2},
            vllm_truncated={"layout": "vllm", "draft_vocab": 24},
        ),
        lambda draft, target, committed, path: medusa.next_logits(draft, target, committed, len(path)),
    ),
    "P_EAGLE": Slow(
        each(
            make_p_eagle,
            amazon={"rms_norm_eps": 1e-6, "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
            speculators={
                **{"dialect": "speculators", "qk_norm": True},
                **{"norm_before_residual": True, "draft_vocab": 24},
            },
            one_layer={"layers": 1, "head_dim": 12},
        ),
        p_eagle.next_logits,
        (LONG_CHAIN, TREE),
        chunk=4,
    ),
    "STANDALONE": Slow(
        STANDALONE, lambda draft, _, committed, path: standalone.next_logits(draft, (*committed, *path), 64)
    ),
    "PARD": Slow(
        {kind: partial(pard, made) for kind, made in STANDALONE.items()},
        lambda draft, _, committed, path: standalone.next_logits(
            draft, (*committed, *[MASK] * len(path)), 64
        ),
        (LONG_CHAIN, TREE),
        chunk=4,
    ),
}


@pytest.mark.parametrize(
    ("method", "kind", "place", "sampling"),
    [
        (method, kind, place, ("greedy", "penalised")[(number + place) % 2])
        for method, slow in SLOW.items()
        for number, kind in enumerate(slow.makes)
        for place in ((0, 1) if number == 0 else (number % 2,))
    ],
)
def test_drafts_are_those_of_the_slow_reading(
    method: str, kind: str, place: int, sampling: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    """Every candidate of every step, from the first on, and no mask stays in the cache."""
    slow, target = SLOW[method], random_models.target
    draft, shape = slow.makes[kind](tmp_path / "draft", target), slow.shapes[place]
    scheduler = scheduler_of(method, target, draft, shape, page_size=4, chunked_prefill_size=slow.chunk)
    check_drafts(scheduler, shape, sampling, partial(slow.next_logits, draft, target))


TEXTS: dict[str, tuple[Shape, Shape, float]] = {
    "EAGLE+NGRAM": ((2, 1, 9), (4, 3, 16), 1.0),
    "EAGLE3+NGRAM": ((4, 3, 16), (2, 1, 9), 1.0),
    "NGRAM": (LONG_CHAIN, (4, 3, 9), 1.0),
    "SUFFIX": (LONG_CHAIN, (4, 3, 9), 1.02),
    "MEDUSA": (CHAIN, TREE, 1.04),  # its heads do not see the root
    "MLP_SPECULATOR": (CHAIN, TREE, 1.1),
    "ARCTIC_LSTM": (TREE, TREE, 1.1),
    "REDRAFTER": ((4, 3, 9), (4, 3, 9), 1.1),
    "HYDRA": ((4, 3, 9), (4, 3, 9), 1.1),
    "DFLASH": (CHAIN, TREE, 1.2),
    "DSPARK": (CHAIN, TREE, 1.2),
    "P_EAGLE": ((4, 3, 9), (4, 3, 9), 1.25),
    "PARD": ((4, 3, 9), (4, 3, 9), 1.3),
    "STANDALONE": (CHAIN, TREE, 1.5),
}
"""The shapes alone and in a small pool, and the least mean length that is accepted: most texts are sampled."""


@in_each_configuration
@pytest.mark.parametrize("method", TEXTS)
def test_every_text_is_that_of_plain_decoding(
    method: str, configuration: dict[str, Any], agreeing: Checkpoints
) -> None:
    *shapes, least = TEXTS[method]
    row = check_texts(agreeing, method, shapes[configuration["batch"] > 1], configuration)
    assert row.mean_accepted_length > least
    assert (row.preemptions > 0) == (configuration["pool"] == "small")


@pytest.mark.parametrize("method", SLOW)
def test_a_draft_that_fits_is_accepted(method: str, agreeing: Checkpoints) -> None:
    check_accepted(agreeing, method, (3, 1, 4))


@pytest.mark.parametrize("method", ["REDRAFTER", "MLP_SPECULATOR", "MEDUSA", "HYDRA", "DFLASH"])
def test_a_cached_prompt_drafts_as_a_computed_one(
    method: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    make = make_block if method == "DFLASH" else next(iter(SLOW[method].makes.values()))
    draft = make(tmp_path / "draft", random_models.target)
    check_cached(scheduler_of(method, random_models.target, draft, (3, 2, 6), page_size=4))


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("MEDUSA", partial(make_medusa, heads=2)),
        ("MLP_SPECULATOR", partial(make_mlp_speculator, n_predict=2)),
    ],
)
def test_the_controller_goes_no_deeper_than_the_levels(
    method: str, make: Callable[..., Path], agreeing: Checkpoints, tmp_path: Path
) -> None:
    draft = make(tmp_path / "draft", agreeing.target, agree=True)
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=100)
    with priced(by_levels(0.01)):
        answer = answer_one(make_scheduler(agreeing.target, **drafting(method, draft)), PROMPT, params)
    assert answer.tokens == answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
    assert 1 < max(answer.runs) <= 3
    with pytest.raises(ValueError, match=r"--speculative-num-steps: the draft .* at most 2 levels, found 3"):
        scheduler_of(method, agreeing.target, draft, (3, 1, 4))


@pytest.mark.parametrize(("method", "most"), [("ARCTIC_LSTM", 3), ("HYDRA", 4)])
def test_no_deeper_than_it_was_trained(method: str, most: int, agreeing: Checkpoints) -> None:
    words = rf"--speculative-num-steps: .* has at most {most} levels, found {most + 1}"
    with pytest.raises(ValueError, match=words):
        agreeing.scheduler(method, (most + 1, 1, most + 2))


@pytest.mark.parametrize("method", ["MEDUSA", "MLP_SPECULATOR"])
def test_settings_that_do_not_fit(method: str, agreeing: Checkpoints) -> None:
    given = {"model_path": str(agreeing.target), "speculative_algorithm": method}
    words = f"--speculative-draft-model-path: needed for --speculative-algorithm {method}"
    with pytest.raises(ValueError, match=words):
        resolve_engine(Settings(**given))
    draft = agreeing.others[method]
    given["speculative_draft_model_path"] = str(draft)
    for value, words in {f"{draft}/config.json": "", "dynamic": " dynamic"}.items():
        with pytest.raises(ValueError, match=f"-token-map{words} can't be used with .*they score"):
            resolve_engine(Settings(**given, speculative_token_map=value))
    override = {"speculative_draft_config_override": '{"rope_theta": 5}'}
    words = "rope_theta is a field of EAGLE and EAGLE3 and MTP and P_EAGLE heads"
    with pytest.raises(ValueError, match=words):
        scheduler_of(method, agreeing.target, draft, (2, 1, 3), **override)
