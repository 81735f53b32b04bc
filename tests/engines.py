"""Schedulers over small checkpoints on disk, driven by hand, and what their steps drafted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from specserve_kernels import Pool, Tree
from torch import Tensor

import specserve.spec.step
from specserve.config import make_settings, resolve, resolve_paths
from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob
from specserve.engine.build import create_scheduler
from specserve.frontend.messages import Failed, Submit
from specserve.models.config import load_model_config
from specserve.scheduler.request import Request
from specserve.scheduler.scheduler import Scheduler
from specserve.spec.context import Context, View
from specserve.spec.tree import StepShape

Shape = tuple[int, int, int]  # steps, topk, verified tokens


@dataclass(frozen=True)
class Checkpoints:
    """Directories of a target and its two drafts."""

    target: Path
    eagle: Path
    eagle3: Path

    def draft(self, algorithm: str) -> Path:
        return {"EAGLE": self.eagle, "EAGLE3": self.eagle3}[algorithm]

    def scheduler(self, algorithm: str, shape: Shape, **settings: Any) -> Scheduler:
        """One that drafts."""
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        return make_scheduler(
            self.target,
            speculative_algorithm=algorithm,
            speculative_draft_model_path=str(self.draft(algorithm)),
            **dict(zip(names, shape, strict=True)),
            **settings,
        )


def make_scheduler(model: Path, **settings: Any) -> Scheduler:
    """A scheduler on the CPU, float64 unless told."""
    given = {"dtype": "float64", "device": "cpu", "skip_tokenizer_init": True, "random_seed": 0, **settings}
    wanted, _ = resolve_paths(make_settings(model_path=str(model), **given))
    config = load_model_config(model)
    resolved, _ = resolve(wanted, config)
    return create_scheduler(resolved, config)


def context_of(scheduler: Scheduler) -> Context:
    return scheduler._runner.context


def requests_of(scheduler: Scheduler) -> list[Request]:
    """Those that have a slot, oldest first."""
    return scheduler._running


@dataclass
class Answer:
    """``runs``: tokens by message, the prefill's first."""

    tokens: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: SpeculationUsage = field(default_factory=SpeculationUsage)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    refused: str | None = None


class Client:
    """Collects what a scheduler says of each request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.answers: dict[str, Answer] = {}

    def submit(self, rid: str, prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> None:
        self.answers[rid] = Answer()
        self.scheduler.submit(Submit(rid, list(prompt), params, choice))

    def iterate(self) -> None:
        for message in self.scheduler.run_once():
            answer = self.answers[message.rid]
            if isinstance(message, Failed):
                answer.refused = message.message
                continue
            assert answer.finish_reason is None, "a message after the last"
            answer.tokens += message.token_ids
            answer.runs += message.runs
            answer.finish_reason = message.finish_reason
            answer.logprobs += message.logprobs or []
            answer.scores += message.prompt_logprobs or []
            answer.cached_tokens = message.cached_tokens
            answer.usage = message.speculation or answer.usage

    def run(self) -> dict[str, Answer]:
        while self.scheduler.has_work:
            self.iterate()
        return self.answers


def answer_all(
    scheduler: Scheduler, work: Iterable[tuple[Sequence[int], SamplingParams]], choice: int = 0
) -> list[Answer]:
    """Runs requests together; the answers in their order."""
    client = Client(scheduler)
    for index, (prompt, params) in enumerate(work):
        client.submit(str(index), prompt, params, choice)
    return list(client.run().values())


def answer_one(
    scheduler: Scheduler, prompt: Sequence[int], params: SamplingParams, choice: int = 0
) -> Answer:
    return answer_all(scheduler, [(prompt, params)], choice)[0]


@dataclass(frozen=True)
class Drafted:
    """What one step drafted for a batch."""

    pool: Pool
    tree: Tree
    room_B: Tensor

    def nodes(self, slot: int) -> list[tuple[int, int, int]]:
        """(token, parent within the slot, depth) of a slot's nodes, its root first with parent -1."""
        first, end = (int(self.tree.q_start[slot + i]) for i in (0, 1))
        token_T, parent_T, depth_T = self.tree.token_T, self.tree.parent_T, self.tree.depth_T
        parents = [int(parent_T[i]) - first if i > first else -1 for i in range(first, end)]
        return list(zip(token_T[first:end].tolist(), parents, depth_T[first:end].tolist(), strict=True))


@contextmanager
def record_drafts() -> Iterator[list[Drafted]]:
    """Every step's pool and trees, in order."""
    found: list[Drafted] = []
    select = specserve.spec.step.select

    def recording(context: Context, view: View, pool: Pool, shape: StepShape) -> Tree:
        tree = select(context, view, pool, shape)
        room_B = context.state.slots.limit[view.rows_B] - view.length_B - 2
        found.append(Drafted(pool, tree, room_B))
        return tree

    with patch.object(specserve.spec.step, "select", recording):
        yield found


def assert_same_drafts(found: Sequence[Drafted], expected: Sequence[Drafted]) -> None:
    """One slot each: trees equal, live scores to rounding."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.nodes(0) == theirs.nodes(0)
        live = theirs.pool.scores_BP > -torch.inf
        assert torch.equal(ours.pool.scores_BP > -torch.inf, live)
        torch.testing.assert_close(
            ours.pool.scores_BP[live], theirs.pool.scores_BP[live], atol=1e-9, rtol=1e-9
        )
