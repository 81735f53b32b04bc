"""Masks: the tokens that may follow the nodes of a step's trees, given the grammars and thinking budgets of its
requests.

Shapes: B prompts, T packed nodes, W words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import NamedTuple, Protocol

import torch
from specserve_kernels import Tree
from torch import Tensor

from specserve.constraints.matcher import Constraint, Grammars
from specserve.core import SamplingParams
from specserve.speculation.state import RowInit


class NodesOnHost:
    """A copy of a step's trees to the host. ``read`` waits for the copy, but not for work queued after it."""

    def __init__(self, tree: Tree) -> None:
        packed = torch.cat([tree.token_T, tree.parent_T, tree.q_start])
        self._sizes = [len(tree.token_T), len(tree.parent_T), len(tree.q_start)]
        self._packed = packed.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if packed.is_cuda else None
        if self._event is not None:
            self._event.record()

    @property
    def on_gpu(self) -> bool:
        return self._event is not None

    def read(self) -> tuple[list[int], list[int], list[int]]:
        """Return the nodes' tokens, their packed parents, and the index of each slot's first node."""
        if self._event is not None:
            self._event.synchronize()
        tokens, parents, starts = self._packed.split(self._sizes)
        return tokens.tolist(), parents.tolist(), starts.tolist()


class MaskedRow(Protocol):
    """What masks read of a request's part in a launch, ``engine.commands.Row``."""

    @property
    def slot(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def final(self) -> bool: ...
    @property
    def masked(self) -> bool: ...


Ends = Mapping[int, Sequence[tuple[list[int], str]]]
"""By the row's index the paths, without the root, to the nodes that its grammar can't follow, ancestors first, and why.
An answer that gets to such a node fails there, and tokens chosen after it are void."""


class Masked(NamedTuple):
    """Masks ``words_TW`` of the tokens after each node, and where answers fail."""

    words_TW: Tensor
    ends: Ends


class Masks:
    """The constraints of the running requests. Without ``grammars``, admission refuses constrained requests."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self.grammars = grammars
        self._constraints: dict[int, Constraint] = {}  # by slot
        self._failed: dict[int, str] = {}  # by slot
        self._proposed: set[int] = set()  # slots whose predicted text may be forced text

    def take_failed(self) -> dict[int, str]:
        """Return the slots whose grammars can't follow their answers, with the reasons, since the last call."""
        failed, self._failed = self._failed, {}
        return failed

    def admit(self, rows: Sequence[RowInit]) -> None:
        """Set up requests that take their slots."""
        for row in rows:
            self._constraints.pop(row.slot, None)
            self._failed.pop(row.slot, None)
            self._proposed.discard(row.slot)
            if row.params.constrained:
                assert self.grammars is not None, "admission refuses constrained requests without grammars"
                self._proposed.add(row.slot)
                with self._failing(row.slot, row.params):
                    self._constraints[row.slot] = self.grammars.constraint(row.params, row.output)

    def free_tokens(self, slot: int) -> float:
        """Return how many tokens of a request are certainly unconstrained after those that were consumed: infinity if
        nothing constrains it."""
        constraint = self._constraints.get(slot)
        return inf if constraint is None else constraint.free_tokens

    def consume(self, rows: Sequence[MaskedRow]) -> None:
        """Advance the constraints by the tokens that the rows emitted since their last launch."""
        for row in rows if self._constraints else ():
            if (constraint := self._constraints.get(row.slot)) is None:
                continue
            with self._failing(row.slot, row.params):
                constraint.consume(row.tokens)
                if constraint.free_tokens == inf:
                    del self._constraints[row.slot]

    def forced(self, rows: Sequence[MaskedRow], most: int) -> list[tuple[int, list[int]]]:
        """Return the slots whose predicted text changes, with the new text: up to ``most`` tokens of what has to come
        next. A request that brought a prediction keeps it."""
        changed = []
        for row in rows if self._constraints or self._proposed else ():
            constraint, tokens = self._constraints.get(row.slot), list[int]()
            if row.params.prediction:
                continue
            if constraint is not None and row.masked and row.params.speculation.enabled:
                tokens = constraint.forced(most)
            if tokens or row.slot in self._proposed:
                changed.append((row.slot, tokens))
            (self._proposed.add if tokens else self._proposed.discard)(row.slot)
        return changed

    def after_prompts(self, rows: Sequence[MaskedRow]) -> Tensor | None:
        """Return masks ``[B, W]`` of the first tokens after final runs, None if no request is constrained."""
        masked = [row.final and not self.free_tokens(row.slot) for row in rows]
        if not any(masked):
            return None
        tokens, parents = [row.tokens[-1] for row in rows], [*range(len(rows))]
        return self._look(rows, masked, tokens, parents, [*range(len(rows) + 1)], pinned=False).words_TW

    def after_nodes(self, rows: Sequence[MaskedRow], nodes: NodesOnHost, pinned: bool) -> Masked:
        """Return the masks of a step's nodes, with all bits set where the row is not masked."""
        return self._look(rows, [row.masked for row in rows], *nodes.read(), pinned)

    def _look(
        self,
        rows: Sequence[MaskedRow],
        masked: Sequence[bool],
        tokens: Sequence[int],
        parents: Sequence[int],
        starts: Sequence[int],
        pinned: bool,
    ) -> Masked:
        assert self.grammars is not None
        words_TW = torch.empty((len(tokens), self.grammars.words), dtype=torch.int32, pin_memory=pinned)
        constraints = [
            (index, constraint)
            for index, row in enumerate(rows)
            if masked[index] and (constraint := self._constraints.get(row.slot)) is not None
        ]
        constraints.sort(key=lambda each: each[1].lane)  # see ``Grammars.fill``
        looks, ends = [], {}
        for index, constraint in constraints:
            begin, end = starts[index], starts[index + 1]
            own = [parent - begin for parent in parents[begin:end]]
            looks.append((begin, constraint.after_nodes(tokens[begin:end], own)))
        for (index, _), errors in zip(constraints, self.grammars.fill(looks, words_TW), strict=True):
            row, first = rows[index], starts[index]
            with self._failing(row.slot, row.params):
                if 0 in errors:
                    raise errors[0]
            if errors and row.params.grammar is not None:
                self.grammars.forget(row.params.grammar)
            ends[index] = [
                (_path(first + node, first, tokens, parents), str(errors[node])) for node in errors
            ]
        return Masked(words_TW, ends)

    @contextmanager
    def _failing(self, slot: int, params: SamplingParams) -> Iterator[None]:
        """Record a request whose grammar can't follow its answer. The scheduler ends it."""
        try:
            yield
        except ValueError as error:
            self._constraints.pop(slot, None)
            self._failed[slot] = str(error)
            if self.grammars is not None and params.grammar is not None:
                self.grammars.forget(params.grammar)


def _path(node: int, root: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens on the way from a tree's root, without its own, to a node."""
    path = []
    while node != root:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
