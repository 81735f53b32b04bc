"""Schedulers over small checkpoints on disk, driven step by step, with a record of what their steps drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from specserve_kernels import Pool, Slots, SlotTables, Tree, select_tree
from specserve_kernels.reference.experts import experts
from torch import Tensor

from specserve import LLM
from specserve.config import make_settings
from specserve.config.paths import BUNDLED_NAME
from specserve.config.speculation import SHAPE
from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob
from specserve.layers import linear
from specserve.layers.formats import stored
from specserve.messages import Failed, Submit
from specserve.models.draft.head import LayerHead
from specserve.process.assemble import create_scheduler, resolve_engine
from specserve.scheduler.request import Request
from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context
from specserve.speculation.control.acceptance import StepOutcome
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.control.cost import CostModel
from specserve.speculation.drafters.eagle import EagleDrafter
from specserve.speculation.drafters.p_eagle import PEagleDrafter
from specserve.speculation.shape import StepShape

Shape = tuple[int, int, int]  # steps, topk, verified tokens


@dataclass(frozen=True)
class Checkpoints:
    """Directories of a target and its drafts; ``others`` by method."""

    target: Path
    eagle: Path
    eagle3: Path
    others: Mapping[str, Path] = field(default_factory=dict)

    @property
    def drafts(self) -> dict[str, Path]:
        """By method."""
        return {"EAGLE": self.eagle, "EAGLE3": self.eagle3, **self.others}

    def draft(self, algorithm: str) -> Path | None:
        return self.drafts.get(algorithm.partition("+")[0])

    def flags(self, method: str = "EAGLE") -> list[str]:
        """Of a server under the bundled model's name, with a draft."""
        drafts = "--speculative-algorithm", method, "--speculative-draft-model-path", str(self.drafts[method])
        return ["--model-path", str(self.target), "--served-model-name", BUNDLED_NAME, *drafts]

    def drafting(self, algorithm: str, shape: Shape | None = None) -> dict[str, Any]:
        return drafting(algorithm, self.draft(algorithm), shape)

    def scheduler(self, algorithm: str, shape: Shape | None, **settings: Any) -> Scheduler:
        """One that drafts; ``shape`` None: what the controller chooses."""
        return make_scheduler(self.target, **self.drafting(algorithm, shape), **settings)


def drafting(algorithm: str, draft: Path | None = None, shape: Shape | None = None) -> dict[str, Any]:
    """The settings of a method; ``shape`` None: what the controller chooses."""
    path = {} if draft is None else {"speculative_draft_model_path": str(draft)}
    return {"speculative_algorithm": algorithm, **path, **({} if shape is None else shaped(*shape))}


def shaped(*shape: int) -> dict[str, Any]:
    """The settings of a step's shape."""
    return dict(zip(SHAPE, shape, strict=True))


def make_scheduler(model: Path, **settings: Any) -> Scheduler:
    """A scheduler on the CPU, float64 and with a small pool unless told."""
    given = {
        "dtype": "float64",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "max_total_tokens": 4096,
        "cpu_threads": 1,  # or it measures how many are best
        **settings,
    }
    return create_scheduler(resolve_engine(make_settings(model_path=str(model), **given))[2])


def context_of(scheduler: Scheduler) -> Context:
    return scheduler.runner.context


def head_of(scheduler: Scheduler) -> LayerHead:
    drafter = context_of(scheduler).drafter
    assert isinstance(drafter, EagleDrafter | PEagleDrafter)
    head = drafter.head
    assert isinstance(head, LayerHead)
    return head


@contextmanager
def held_as_on_a_gpu(yes: bool = True) -> Iterator[None]:
    """Loaded weights are kept quantized, or not."""
    with (
        patch.object(stored, "on_gpu", return_value=yes),
        patch.object(stored, "multiplies_integers", lambda _, dtype: yes and dtype != torch.float64),
    ):
        yield


@contextmanager
def not_rounded() -> Iterator[None]:
    """Inputs of FP8 weights stay as they are."""
    with patch.object(linear, "rounded_inputs", _same), patch.object(experts, "rounded_inputs", _same):
        yield


def _same(x_TI: Tensor, _: torch.dtype) -> Tensor:
    return x_TI


def multiply_integers(module: torch.nn.Module) -> None:
    """Make each ``Linear`` that is quantized what one in 16 bits is in an int8 draft on a GPU, wherever it is."""
    with patch.object(linear, "multiplies_integers", return_value=True):
        for name, child in list(module.named_modules()):
            if isinstance(child, linear.Linear) and not (child.stacked or child.kept_plain):
                module.set_submodule(name, linear.QuantizedLinear(child, torch.int8))


def requests_of(scheduler: Scheduler) -> list[Request]:
    """Those that have a slot, oldest first."""
    return scheduler.running


@dataclass
class Answer:
    """``runs``: tokens by message, prefill's first."""

    tokens: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: SpeculationUsage = field(default_factory=SpeculationUsage)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    refused: str | None = None


class Client:
    """Collect a scheduler's messages by request."""

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
    """Run requests together; the answers in their order."""
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
    """The draft of one step for a batch."""

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

    def recording(pool: Pool, slots: Slots, tables: SlotTables, *args: Any, **kwargs: Any) -> Tree:
        tree = select_tree(pool, slots, tables, *args, **kwargs)
        found.append(Drafted(pool, tree, tables.limit[slots.rows_B] - slots.length_B - 2))
        return tree

    with patch("specserve.speculation.step.select_tree", recording):
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


@contextmanager
def priced(cost: Callable[[StepShape], float], slope: float = 0.0) -> Iterator[None]:
    """Controllers made here believe these costs of steps, and ``slope`` for each cached token, whatever steps take."""

    def measure(_: Any, most: int, candidates: Callable[[int], Sequence[StepShape]], __: Any) -> CostModel:
        shapes = [shape for slots in range(1, most + 1) for shape in candidates(slots)]
        return CostModel({shape: cost(shape) for shape in shapes}, slope)

    with (
        patch("specserve.process.assemble.measure_eager", measure),
        patch.object(CostModel, "observe", lambda *_: None),
    ):
        yield


def by_levels(level: float) -> Callable[[StepShape], float]:
    """Steps cost 1, and so much more for each draft level."""
    return lambda shape: 1 + level * shape.levels


class SwitchingShapes:
    """A policy that runs ``shapes`` in random order, for one request at a time. ``steps``: the tokens of each step, by
    request and the number of tokens that earlier steps had given it."""

    cost = None

    def __init__(self, shapes: Sequence[StepShape], seed: int = 0) -> None:
        self.steps: dict[tuple[int, int], tuple[StepShape, int]] = {}
        self._shapes = shapes
        self._random = random.Random(seed)
        self._requests: list[object] = []
        self._given = 0

    def choose(self, batch: Batch) -> StepShape:
        return self._random.choice(self._shapes)

    def plain(self, slots: int) -> StepShape:
        return StepShape.plain(slots)

    def observe(self, shape: StepShape, batch: Batch, outcome: StepOutcome, seconds: float) -> None:
        (effect,), (tokens,) = batch.effects, outcome.emitted
        if not any(effect is known for known in self._requests):
            self._requests.append(effect)
            self._given = 0
        self.steps[len(self._requests), self._given] = shape, tokens
        self._given += tokens


def check_switching(llm: LLM, prompts: Sequence[list[int]], shapes: Sequence[StepShape], tokens: int) -> int:
    """What a step gives depends on where it starts and on its shape, not on the shapes of the steps before. Returns how
    many steps were compared."""
    scheduler = llm.engine
    assert isinstance(scheduler, Scheduler)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found, texts = {}, []
    for name, choice in {"all": shapes, **{str(shape): [shape] for shape in shapes}}.items():
        policy = SwitchingShapes(choice)
        assert llm.engine is scheduler, "nothing runs any more"
        scheduler.policy = policy
        texts.append([llm.generate([prompt], params)[0].token_ids for prompt in prompts])
        found[name] = policy.steps
    assert all(text == texts[0] for text in texts)
    compared = 0
    for (request, start), (shape, given) in found["all"].items():
        alone = found[str(shape)].get((request, start))
        if alone is not None and start + given < tokens:
            assert alone == (shape, given), f"request {request}, token {start}"
            compared += 1
    return compared
