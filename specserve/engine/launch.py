"""Work queued on the device, and its results. Shapes: B requests, S draft levels, X sources of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.constraints.masks import Ends
from specserve.core import TokenLogprob
from specserve.engine.commands import Row
from specserve.engine.profile import Stopwatch
from specserve.speculation.logprobs import Logprobs

NO_ENDS: Ends = {}


@dataclass(frozen=True, slots=True)
class Emitted:
    """A launch's result for one request."""

    tokens: list[int]
    drafted: int
    chain: int  # nodes of its tree that a chain would have drafted: the first choices from the root on
    firsts: int  # how many of those were accepted
    logprobs: list[TokenLogprob] | None
    scores: list[TokenLogprob]  # of the row's scored prompt tokens
    predicted: range = range(0)  # the part of the request's prediction that its first tokens match
    sources: Sequence[int] = ()  # for each source: tokens tested, right and accepted
    error: str | None = None  # why its grammar can't follow it after these tokens


class Launch:
    """Work queued on the device. Only ``read`` waits for it."""

    def __init__(
        self,
        packed: Tensor,
        logprobs: Logprobs | None,
        rows: Sequence[Row],
        stopwatch: Stopwatch,
        predicted_B2: Tensor | None = None,
        scores: Logprobs | None = None,
        sources_BX: Tensor | None = None,
        ends: Ends = NO_ENDS,
    ) -> None:
        """``packed`` ``[B, S + 4]``: tokens, -1 after the last one, then nodes drafted, first choices, and accepted
        first choices. ``predicted_B2``: as in ``StepResult``, None without predictions. ``scores``: of the scored
        prompt tokens, by row. ``sources_BX``: as in ``StepResult``. ``ends``: see ``Ends``."""
        self._rows = rows
        self._ends = ends
        self._stopwatch = stopwatch
        self._packed = to_host(packed)
        self._logprobs, self._scores = _on_host(logprobs), _on_host(scores)
        self._predicted = None if predicted_B2 is None else to_host(predicted_B2)
        self._sources = None if sources_BX is None else to_host(sources_BX)
        self._event = torch.cuda.Event() if packed.is_cuda else None
        if self._event is not None:
            self._event.record()

    @property
    def seconds(self) -> float:
        """Seconds that the device spent on it, once it has been read."""
        return self._stopwatch.seconds

    def idle_after(self, earlier: Launch) -> float:
        """Return the seconds between an earlier launch and this one, once both have been read."""
        return self._stopwatch.since(earlier._stopwatch)

    def read(self) -> list[Emitted]:
        """Wait, and return one entry for each row, in the launch's order."""
        if self._event is not None:
            self._event.synchronize()
        out, reported, scored = [], 0, 0
        nothing = [(0, 0)] * len(self._rows)
        predicted = nothing if self._predicted is None else self._predicted.tolist()
        sources = [()] * len(self._rows) if self._sources is None else self._sources.tolist()
        entries = zip(self._rows, self._packed.tolist(), predicted, sources, strict=True)
        for index, (row, entry, (first, count), counts) in enumerate(entries):
            *chosen, drafted, chain, firsts = entry
            tokens = [token for token in chosen if token >= 0]
            ends = ((path, why) for path, why in self._ends.get(index, ()) if tokens[: len(path)] == path)
            tokens, error = next(ends, (tokens, None))
            logprobs = None
            if row.params.logprobs is not None:
                logprobs = _row_logprobs(self._logprobs, row.params.logprobs, tokens, reported)
                reported += len(chosen)
            scores = []
            if row.scored:
                scores = _row_logprobs(self._scores, row.params.prompt_logprobs or 0, row.scored, scored)
                scored += len(row.scored)
            hits = range(first, first + count)
            out.append(Emitted(tokens, drafted, chain, firsts, logprobs, scores, hits, counts, error))
        return out


def _row_logprobs(
    found: Logprobs | None, count: int, tokens: Sequence[int], start: int
) -> list[TokenLogprob]:
    assert found is not None
    own, values, ids = (part[start : start + len(tokens)].tolist() for part in found)
    return [
        TokenLogprob(token, own[i], list(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, token in enumerate(tokens)
    ]


def _on_host(found: Logprobs | None) -> Logprobs | None:
    if found is None:
        return None
    own, values, ids = found
    return to_host(own), to_host(values), to_host(ids)


def to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)
