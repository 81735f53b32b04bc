"""Tests for every method: its drafts match a slow reference, and no text changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from torch import Tensor

from benchmarks import lossless
from benchmarks.lossless import Item, Models, Row, make_items, reference_texts, run_configuration
from specserve.scheduler.scheduler import Scheduler
from tests.engines import Checkpoints, Shape, answer_one, drafting, make_scheduler, record_drafts
from tests.reference import tree
from tests.reference.decode import Request
from tests.reference.models import load_checkpoint, save_checkpoint
from tests.reference.sampler import draft_log_probs
from tests.speculation.oracle import SAMPLING, reference_params
from tests.speculation.test_drafted_tree import check_step

PROMPT = [1, 5, 9, 33, 60]
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]

in_each_configuration = pytest.mark.parametrize(
    "configuration",
    [
        {"batch": 1, "page": 16, "chunk": 512, "pool": "normal", "prefix_cache": True, "overlap": "on"},
        {"batch": 4, "page": 1, "chunk": 16, "pool": "small", "prefix_cache": True, "overlap": "off"},
    ],
    ids=["alone", "small pool"],
)


def each_with_both(makes: Iterable[str], shapes: Sequence[Shape]) -> pytest.MarkDecorator:
    """Each ``make`` with both shapes, and with both kinds of sampling. From one make to the next the pairs change."""
    cases = [
        (make, shape, ("greedy", "penalised")[(i + j) % 2])
        for i, make in enumerate(makes)
        for j, shape in enumerate(shapes)
    ]
    return pytest.mark.parametrize(
        ("make", "shape", "sampling"), cases, ids=[f"{a}-{b}-{c}" for a, b, c in cases]
    )


def scheduler_of(method: str, target: Path, draft: Path, shape: Shape, **settings: Any) -> Scheduler:
    return make_scheduler(target, **drafting(method, draft, shape), **settings)


@cache
def _items_and_texts(target: Path) -> tuple[list[Item], list[list[int]]]:
    """Requests, and what plain decoding answers."""
    prompts = [[3 + i, 9, 14 + i, 2, 33, 2, 33, 2, 3 + i, 9] for i in range(6)]
    items = make_items(prompts, len(lossless.SAMPLING), 12)
    return items, reference_texts(Models(target, {}, "float64", "cpu"), items)


def check_texts(
    models: Checkpoints, method: str, shape: Shape, configuration: dict[str, Any], **settings: Any
) -> Row:
    """Each is that of plain decoding, mixed with requests that don't draft, or few tokens."""
    items, expected = _items_and_texts(models.target)
    paths = Models(models.target, models.drafts, "float64", "cpu")
    with patch.dict(lossless.SPECULATION, {"its own": (method, *shape)}):
        given = {**configuration, "toggled": True, "speculation": "its own", "settings": settings}
        row, differences = run_configuration(paths, 0, given, items, expected)
    assert (row.identical, row.texts, differences) == (len(items), len(items), [])
    return row


def check_drafts(
    scheduler: Scheduler,
    shape: Shape,
    sampling: str,
    next_logits: Callable[[tuple[int, ...], tuple[int, ...]], Tensor],
) -> None:
    """Every candidate of every step, from the first on. ``next_logits``: after committed tokens and a path."""
    params = msgspec.structs.replace(SAMPLING[sampling], max_tokens=7 + shape[0])
    request = Request(tuple(PROMPT), reference_params(params, PROMPT, choice=1))
    with record_drafts() as drafts:
        answer = answer_one(scheduler, PROMPT, params, choice=1)
    done, steps = 0, 0
    for run, found in zip(answer.runs, drafts, strict=False):
        done += run
        if done > 6:
            break
        committed = (*PROMPT, *answer.tokens[:done])

        def log_probs(path: tuple[int, ...], committed: tuple[int, ...] = committed) -> Tensor:
            return draft_log_probs(next_logits(committed, path), **request.context(committed + path))

        check_step(found, tree.expand(log_probs, *shape[:2]), shape, committed[-1])
        steps += 1
    assert steps > 1


def check_cached(scheduler: Scheduler) -> None:
    """It drafts after a cached prompt what it drafts after a computed one."""
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=12)
    found = []
    for _ in range(2):
        with record_drafts() as drafts:
            answer = answer_one(scheduler, [(7 * i) % 64 for i in range(23)], params)
        found.append((answer.tokens, [each.nodes(0) for each in drafts]))
    assert answer.cached_tokens == 20
    assert found[0] == found[1]


def check_accepted(models: Checkpoints, method: str, shape: Shape) -> None:
    """A draft that fits is accepted, rounded or not, and changes no text, with a controller or copied text either."""
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=24)
    prompt = [3, 9, 14, 2]
    expected = answer_one(make_scheduler(models.target), prompt, params).tokens
    for kind in ("none", "int8", "fp8"):
        scheduler = models.scheduler(method, shape, speculative_draft_quantization=kind)
        answer = answer_one(scheduler, prompt, params)
        assert answer.usage.accepted / answer.usage.steps > 0.35
        assert answer.tokens == expected
    assert answer_one(models.scheduler(method, None), prompt, params).tokens == expected
    assert answer_one(models.scheduler(f"{method}+NGRAM", (2, 1, 9)), prompt, params).tokens == expected


def check_alike(method: str, target: Path, *drafts: Path) -> None:
    """All draft the same."""
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=8)
    trees = []
    for draft in drafts:
        with record_drafts() as found:
            answer_one(scheduler_of(method, target, draft, (3, 2, 6)), PROMPT, params)
        trees.append([each.nodes(0) for each in found])
    assert all(each == trees[0] for each in trees)


def check_broken(models: Checkpoints, method: str, change: Change, words: str, path: Path) -> None:
    """The method's draft is refused after a change of its tensors and its config."""
    state, config = load_checkpoint(models.others[method])
    change(state, config)
    draft = save_checkpoint(path / "draft", state, config, safetensors=True)
    with pytest.raises(ValueError, match=words):
        scheduler_of(method, models.target, draft, (2, 1, 3))
