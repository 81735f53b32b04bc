"""What drafts would be worth at every position of real answers, for all shapes at once.

The engine answers plainly, one token a step; before each step the draft grows its whole pool, once for each topk, and
nothing of it is verified. A shallower draft is the beginning of a deeper one, and the answer says which candidates were
right, so these pools tell what any shape would have accepted there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specserve.engine.commands import Prefill, Step
from specserve.engine.runner import Launch, Runner
from specserve.speculation.context import Context
from specserve.speculation.control.acceptance import Given
from specserve.speculation.control.adaptive import Batch
from specserve.speculation.shape import StepShape
from specserve.speculation.state import to_device
from specserve.tools.tune.walk import Answer, Array, Pools


@dataclass(frozen=True, slots=True)
class _Step:
    launch: Launch
    slots: list[int]
    pools: Mapping[int, Pools]  # by topk; a row a slot


class DraftRecorder(Runner):
    """Drafts ``levels[topk]`` levels for each topk and verifies none of it."""

    def __init__(self, context: Context, levels: Mapping[int, int]) -> None:
        super().__init__(context, {})
        self._levels = levels
        self._steps: list[_Step] = []
        self._begun: list[tuple[int, int]] = []  # of each answer its slot and the steps before it

    def prefill(self, command: Prefill) -> Launch:
        self._begun += [(row.slot, len(self._steps)) for row in command.rows if row.final]
        return super().prefill(command)

    @torch.inference_mode()
    def step(self, command: Step) -> Launch:
        rows = command.rows
        slots = [row.slot for row in rows]
        view = self._view(rows, to_device(slots, self.context.state.device))
        pools = {}
        for topk, levels in self._levels.items():
            deep = StepShape(len(rows), len(rows), levels, topk)
            pool = self.context.drafter.propose(self.context, view, deep, view.sampling(self.context, levels))
            parts = (pool.tokens_BP, pool.parents_BP, pool.scores_BP.float())
            pools[topk] = Pools(*(part.cpu().numpy() for part in parts))
        launch = super().step(Step(rows, StepShape.plain(len(rows))))
        self._steps.append(_Step(launch, slots, pools))
        return launch

    @property
    def recorded(self) -> int:
        """Steps so far."""
        return len(self._steps)

    def answers(self, ended: Sequence[bool]) -> list[Answer]:
        """In the order in which they were asked for. ``ended``: of all asked for, whether it was answered to its end.
        Those that had not begun are left out."""
        ends: dict[int, int] = {}  # of a slot the step that its next answer begins with
        found: list[Answer] = []
        for (slot, begin), whole in reversed([*zip(self._begun, ended, strict=False)]):
            found.append(self._answer(slot, self._steps[begin : ends.get(slot)], not whole))
            ends[slot] = begin
        return found[::-1]

    def _answer(self, slot: int, steps: Sequence[_Step], cut: bool) -> Answer:
        tokens: list[int] = []
        pools: dict[int, list[tuple[Array, Array, Array]]] = {topk: [] for topk in self._levels}
        for step in steps:
            if slot not in step.slots:
                continue
            row = step.slots.index(slot)
            tokens += step.launch.read()[row].tokens
            for topk, rows in pools.items():
                found = step.pools[topk]
                rows.append((found.tokens[row], found.parents[row], found.scores[row]))
        return Answer(tokens, {topk: Pools.stacked(rows) for topk, rows in pools.items() if rows}, cut)


@dataclass(frozen=True, slots=True)
class DeepShapes:
    """The policy of a recorded run: its shape has the positions that the deepest draft writes, and no nodes to
    verify."""

    steps: int
    topk: int
    cost: None = field(default=None)

    def choose(self, batch: Batch) -> StepShape:
        return StepShape(len(batch.skills), len(batch.skills), self.steps, self.topk)

    def plain(self, slots: int) -> StepShape:
        """Drafts, too: the pool must hold them."""
        return StepShape(slots, slots, self.steps, self.topk)

    def observe(self, shape: StepShape, batch: Batch, given: Given, seconds: float) -> None:
        """Nothing depends on it."""
