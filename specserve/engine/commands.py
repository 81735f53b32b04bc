"""Commands to an executor: plain data, so that another process can be given the same commands and do the same work.

An executor's device state is a function of its weights and the commands it was given, in order. All that is decided by
time, memory, chance, text or grammar is in them.

Shapes: B prompts, T packed nodes, W words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from specserve.core import SamplingParams
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Continuation, PageRun, RowInit


@dataclass(frozen=True, slots=True)
class Row:
    """A request's part in a launch. ``length``: an upper bound of the tokens in its cache, before a step or after a
    prefill.

    ``tokens``: of a prefill, what to run; of a step, what a constrained request emitted since its last launch.
    ``masked``, of a step: the host restricts the tokens that may follow the row's nodes. ``scored``, of a prefill: the
    tokens after each of the first ones run, whose log-probabilities are requested.
    """

    slot: int
    params: SamplingParams
    length: int
    tokens: Sequence[int] = ()
    final: bool = True  # prefill: a token is chosen after them
    scored: Sequence[int] = ()
    masked: bool = False


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Give requests their slots."""

    rows: Sequence[RowInit]


class SetPages(msgspec.Struct, tag=True, frozen=True):
    """Set parts of slots' page tables."""

    runs: Sequence[PageRun]


class CopyStates(msgspec.Struct, tag=True, frozen=True):
    """Copy states of slots to snapshots, or ``back``, in order: pairs of a slot and a snapshot's number."""

    pairs: Sequence[tuple[int, int]]
    back: bool = False


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """Run a chunk of each row's prompt. Rows that are not final emit nothing. ``words`` ``[B, W]``: masks of the tokens
    after them, as ``hold`` takes them."""

    rows: Sequence[Row]
    words: Tensor | None = None


class Step(msgspec.Struct, tag=True, frozen=True):
    """Run one step of all rows. The shape's remaining slots are padding."""

    rows: Sequence[Row]
    shape: StepShape


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Draft and verify a masked step, before its rows' last tokens are known. ``Settle`` comes next."""

    rows: Sequence[Row]
    shape: StepShape


class Settle(msgspec.Struct, tag=True, frozen=True):
    """Finish the step that was begun. The rows are the same, with the tokens known by now. ``words`` ``[T, W]``: masks
    of the tokens after each node."""

    rows: Sequence[Row]
    words: Tensor | None = None


class Measure(msgspec.Struct, tag=True, frozen=True):
    """Run a step of this shape after ``length`` tokens, which belongs to no request."""

    shape: StepShape
    length: int


class CatchUp(msgspec.Struct, tag=True, frozen=True):
    """Make the drafter process what steps without drafts have left of these slots."""

    slots: Sequence[int]


class SetPredictions(msgspec.Struct, tag=True, frozen=True):
    """Replace the predicted texts of some slots, before the next step."""

    due: Sequence[tuple[int, Sequence[int]]]


class SetDraftRows(msgspec.Struct, tag=True, frozen=True):
    """Make the draft read these rows of its head from the next step on."""

    rows: Sequence[int]


class SetDraftTemperatures(msgspec.Struct, tag=True, frozen=True):
    """Guess the drafts of these slots at these temperatures from the next step on."""

    slots: Sequence[int]
    temperatures: Sequence[float]


class SetContinuations(msgspec.Struct, tag=True, frozen=True):
    """Replace the continuations of some slots' texts."""

    continuations: Sequence[Continuation]


_SetDrafts = SetPredictions | SetDraftRows | SetDraftTemperatures | SetContinuations
Change = Admit | SetPages | CopyStates | CatchUp | _SetDrafts
"""What only writes state, before the next launch."""
Command = Change | Measure | Prefill | Step | Begin | Settle


def _plain(words: Any) -> Any:
    return words.shape[0], words.numpy().data.cast("B")


def _words(_: type, plain: Any) -> Tensor:
    count, words = plain
    return torch.frombuffer(bytearray(words), dtype=torch.int32).view(count, -1)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""Return a command as bytes, for another process of the same version."""
decode = msgspec.msgpack.Decoder(Command, dec_hook=_words).decode
"""Return the command that ``encode`` was given."""
