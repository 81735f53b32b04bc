"""What the runner is told: plain data, so that another process can be told the same and do the same.

A runner's device state is a function of its weights and the commands it was given, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from specserve.core import SamplingParams
from specserve.speculation.shape import StepShape
from specserve.speculation.state import RowInit


@dataclass(frozen=True, slots=True)
class Row:
    """A request's part in a launch. ``length`` bounds the tokens in its cache, before a step or after a prefill.
    ``tokens``: of a prefill, what to run; of a step with a grammar, what was emitted since the row's last launch.
    ``scored``, of a prefill: tokens that follow the first ones run, whose log-probabilities are wanted."""

    slot: int
    params: SamplingParams
    length: int
    tokens: Sequence[int] = ()
    final: bool = True  # prefill: a token is chosen after them
    scored: Sequence[int] = ()


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Requests take their slots."""

    rows: Sequence[RowInit]


class SetPages(msgspec.Struct, tag=True, frozen=True):
    """A slot's page table has these pages from entry ``start`` on."""

    slot: int
    start: int
    pages: Sequence[int]


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """Run a chunk of each row's prompt. Rows that are not final emit nothing."""

    rows: Sequence[Row]


class Step(msgspec.Struct, tag=True, frozen=True):
    """Run one step of all rows. Slots of the shape beyond them are padding."""

    rows: Sequence[Row]
    shape: StepShape


class SetDraftRows(msgspec.Struct, tag=True, frozen=True):
    """The draft reads these rows of its head from the next step on."""

    rows: Sequence[int]


Command = Admit | SetPages | Prefill | Step | SetDraftRows
