"""The scheduler's access to the device: what is decided on the host alone is decided here, before a command is executed
by this process and by all that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from specserve.constraints.masks import Masks
from specserve.engine import commands
from specserve.engine.commands import Command, Row
from specserve.engine.executor import Executor
from specserve.engine.graphs import Graphs
from specserve.engine.launch import Launch
from specserve.layers.ranks import Ranks
from specserve.speculation.context import Context

MOST_DUE = 64  # most tokens of forced text


@dataclass(frozen=True, slots=True)
class Report:
    """What is known behind the runner. ``eager_steps``: steps without a graph, on an engine that has graphs.
    ``drafter``: its name, None without one. ``sources``: the names of the sources of its trees."""

    eager_steps: int
    drafter: str | None
    sources: Sequence[str]


class Followers(Protocol):
    """The processes that execute the same commands on other ranks."""

    ranks: Ranks

    @property
    def places(self) -> list[dict[str, Any]]: ...
    def send(self, command: Command) -> None: ...
    def check(self) -> None:
        """Raise RankGone if one has ended."""
        ...

    def close(self) -> None: ...


class Runner(Executor):
    """Executes commands, with the masks of grammars and budgets that it fills, after it has sent them to followers."""

    def __init__(
        self, context: Context, graphs: Graphs | None = None, followers: Followers | None = None
    ) -> None:
        super().__init__(context, graphs)
        self.followers = followers
        self.masks = Masks()
        self._behind: dict[int, int] = {}  # steps without drafts of a slot that its drafter has not processed
        self._given_up: list[int] = []  # slots of which the same is true

    def report(self) -> Report:
        drafter = self.context.drafter
        return Report(self._eager_steps, drafter.name or None, drafter.sources)

    def compile(self, grammar: str) -> Future[object] | None:
        """Begin to compile a grammar, so that a request with it can be admitted; None if there are no grammars."""
        return None if self.masks.grammars is None else self.masks.grammars.compile(grammar)

    def _send(self, command: Command) -> None:
        if self.followers is not None:
            self.followers.send(command)

    def change(self, command: commands.Change) -> None:
        match command:
            case commands.SetPages(runs=[]) | commands.CopyStates(pairs=[]) | commands.CatchUp(slots=[]):
                return
            case commands.Admit():
                self._keep_up()  # it reads the features of page ends
                self.masks.admit(command.rows)
        self._send(command)
        super().change(command)

    def give_up(self, slot: int, cached: bool) -> None:
        """Note that a request leaves a slot. ``cached``: its drafter catches up first, as others may read its pages."""
        if self._behind.pop(slot, 0) and cached:
            self._given_up.append(slot)

    def _keep_up(self, rows: Sequence[Row] = (), depth: int = 0) -> None:
        """Catch up before a launch: with slots given up, and with a step's if it drafts or can't leave another."""
        most, behind = self.context.drafter.needs.deferred, self._behind
        slots = [row.slot for row in rows if most]
        due, self._given_up = self._given_up, []
        if depth or any(behind.get(slot) == most for slot in slots):
            due += [slot for slot in slots if behind.pop(slot, 0)]
        self.change(commands.CatchUp(due))
        if not depth:
            behind.update((slot, behind.get(slot, 0) + 1) for slot in slots)

    def measure(self, command: commands.Measure) -> float:
        self._send(command)
        return super().measure(command)

    def prefill(self, command: commands.Prefill) -> Launch:
        self._keep_up()
        command = commands.Prefill(command.rows, self.masks.after_prompts(command.rows))
        self._send(command)
        return super().prefill(command)

    def step(self, command: commands.Step) -> Launch:
        """Masked steps run in two parts."""
        self._tell(command.rows)
        if any(row.masked for row in command.rows):
            self.begin(commands.Begin(command.rows, command.shape))
            return self._settle(command.rows)
        self._keep_up(command.rows, command.shape.depth)
        self._send(command)
        return super().step(command)

    def begin(self, command: commands.Begin) -> None:
        self._keep_up(command.rows, command.shape.depth)
        self._send(command)
        super().begin(command)

    def settle(self, command: commands.Settle) -> Launch:  # type: ignore[override]
        """Fill the masks of the step that was begun, and queue the rest of it."""
        self._tell(command.rows)
        return self._settle(command.rows)

    def _settle(self, rows: Sequence[Row]) -> Launch:
        assert self._begun is not None
        words_TW, ends = self.masks.after_nodes(rows, self._begun.nodes, self._begun.pinned)
        command = commands.Settle(rows, words_TW)
        self._send(command)
        return super().settle(command, ends)

    def _tell(self, rows: Sequence[Row]) -> None:
        """Advance constraints by the emitted tokens, and make the text that has to come next the predicted text of
        constrained requests. A step already begun follows it too, so that the next one proposes the rest."""
        self.masks.consume(rows)
        prediction = self.context.state.prediction
        if prediction is not None:
            most = min(MOST_DUE, prediction.tokens_RP.shape[1])
            if due := self.masks.forced(rows, most):
                self.change(commands.SetPredictions(due))
