"""A simulated machine with its own clock for the search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specserve.engine.shapes import step_shape
from specserve.speculation.shape import StepShape
from specserve.tools.tune.board import Board
from specserve.tools.tune.grid import Candidate, Grid
from specserve.tools.tune.loop import Run
from specserve.tools.tune.search import Search


@dataclass
class Machine:
    """``rank``: the probability that a level's first guess is right. Runs vary by ``noise``, and all slow down over
    time."""

    rank: float  # chance at topk 1
    level: float  # milliseconds of a draft's level
    node: float  # of a node verified
    noise: float = 0.004
    drift: float = 0.3  # slower at the end of 100 seconds
    unequal: float = 0.0  # how much easier than the mean the easiest request is
    now: float = 0.0
    ran: list[tuple[Candidate, int]] = field(default_factory=list)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def shape(self, candidate: Candidate, batch: int) -> StepShape:
        return step_shape(batch, candidate, batch)

    def seconds(self, shape: StepShape) -> float:
        level = self.level * (1 + 0.02 * shape.branching * shape.slots)
        return (8 + max(0.0, shape.nodes - 24) * self.node + level * shape.levels) / 1e3

    def tokens(self, shape: StepShape, ease: float = 0.0) -> float:
        """A budget of n nodes a level makes up for a narrow tree, little by little."""
        if not shape.levels:
            return 1.0
        wide = min(shape.branching, shape.nodes / shape.slots / shape.levels)
        rank = min(1.0, max(0.0, self.rank + ease))
        chance = 1 - (1 - rank) ** (1 + 0.4 * float(np.log2(max(1.0, wide))))
        return float(sum(chance**level for level in range(shape.levels + 1)))

    def rate(self, candidate: Candidate, batch: int) -> float:
        shape = self.shape(candidate, batch)
        return batch * self.tokens(shape) / self.seconds(shape)

    def ease(self, first: int, count: int) -> float:
        """Of these requests: each is easier or harder to guess than others."""
        eases = np.sin(2.4 * np.arange(REQUESTS))
        asked = [eases[index % REQUESTS] for index in range(first, first + count)]
        return float(np.mean(asked) - eases.mean()) * self.unequal

    def forget(self) -> None:
        """Nothing was prepared."""

    def run(self, candidate: Candidate, batch: int, first: int, count: int, quick: bool = False) -> Run:
        self.ran.append((candidate, batch))
        shape, tokens = self.shape(candidate, batch), (8 if quick else 30) * count
        slower = 1 + self.drift * self.now / 100 + self.noise * self.generator.standard_normal()
        steps = tokens / self.tokens(shape, self.ease(first, count)) / batch
        seconds = steps * self.seconds(shape) * slower
        self.now += seconds * 1.1
        return Run(tokens, seconds, 0.1 * seconds, round(steps), round(steps * batch))

    def run_controller(self, batch: int, first: int, count: int) -> Run:
        """One that always takes the same chain."""
        run = self.run((2, 1, 3), batch, first, count)
        self.ran.pop()
        return run


MACHINES = {
    "trees pay": {"rank": 0.6, "level": 0.25, "node": 0.01},
    "short chains pay": {"rank": 0.55, "level": 1.2, "node": 0.25},
    "a draft of no use": {"rank": 0.02, "level": 0.5, "node": 0.1},
}
BATCHES = (1, 4, 16)
REQUESTS = 20


def search(machine: Machine, seconds: float = 300.0, **given: Any) -> list[Board]:
    candidates = Grid().candidates()
    return Search(machine, candidates, BATCHES, seconds, clock=lambda: machine.now, **given).run()
