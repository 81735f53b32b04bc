"""Run prefill and steps on the device, and return their results without waiting for them.

Shapes: B requests, S draft levels, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from specserve.constraints.masks import Ends, Masks, NodesOnHost
from specserve.core import SamplingParams, TokenLogprob
from specserve.engine.commands import (
    Admit,
    Begin,
    Command,
    Prefill,
    Row,
    SetContinuations,
    SetDraftRows,
    SetDraftTemperatures,
    SetPages,
    Settle,
    Step,
)
from specserve.engine.graphs import PartedGraph, PromptGraph, StepGraph
from specserve.engine.profile import Stopwatch
from specserve.engine.prompts import PromptSize, Run, size_for
from specserve.speculation.context import Context, View
from specserve.speculation.logprobs import Logprobs, token_logprobs
from specserve.speculation.prefill import PrefillResult, PromptChunks, ScoredTokens, prefill
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs, to_device
from specserve.speculation.step import StepResult, draft, settle, step, verify

NO_ENDS: Ends = {}
MOST_DUE = 64  # most tokens of forced text
# (first position, tokens) of warm-up prompts. Projections use other kernels above 64 and above 96 tokens, and cuBLAS
# others for many tokens; attention has one kernel with a prefix and one without.
WARM_UP = ((0, 72), (1, 64), (1, 128), (1, 1024))


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


def _asked(rows: Sequence[Row], predicted_B2: Tensor | None) -> Tensor | None:
    """Return the rows' part of the table, None if no row can have a predicted text."""
    if predicted_B2 is None or not any(row.params.prediction or row.masked for row in rows):
        return None
    return predicted_B2[: len(rows)]


def to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


@dataclass(frozen=True, slots=True)
class Report:
    """What is known behind the runner. ``eager_steps``: steps without a graph, on an engine that has graphs.
    ``drafter``: its name, None without one. ``sources``: the names of the sources of its trees."""

    eager_steps: int
    drafter: str | None
    sources: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A masked step whose target is running. ``finish`` takes the masks, in pinned memory if ``pinned``."""

    nodes: NodesOnHost
    finish: Callable[[Tensor], StepResult]
    stopwatch: Stopwatch
    pinned: bool


class Runner:
    """The only access to the device while serving, for reads too. Commands are queued in order; state and cache change
    in that order."""

    def __init__(
        self,
        context: Context,
        graphs: Mapping[StepShape, StepGraph],
        prompts: Mapping[PromptSize, PromptGraph] | None = None,
        capture_next: Callable[[], bool] | None = None,
        in_parts: Callable[[StepShape], PartedGraph | None] = lambda shape: None,
    ) -> None:
        """``graphs``: captured steps. ``prompts``: captured prompt launches. ``in_parts`` returns steps captured in
        parts. All others run eagerly. ``capture_next`` captures one more step; None: none was left for idle times."""
        self.context = context
        self.capture_next = capture_next
        self._eager_steps = 0
        self._graphs = graphs
        self._prompts = prompts or {}
        self._in_parts = in_parts
        self._begun: _Begun | None = None
        self.masks = Masks()

    def report(self) -> Report:
        drafter = self.context.drafter
        return Report(self._eager_steps, drafter.name or None, drafter.sources)

    def compile(self, grammar: str) -> Future[object] | None:
        """Begin to compile a grammar, so that a request with it can be admitted; None if there are no grammars."""
        return None if self.masks.grammars is None else self.masks.grammars.compile(grammar)

    @torch.inference_mode()
    def warm_up(self, most: int) -> None:
        """Run prompts of up to ``most`` tokens, fewer than the context holds, on the padding slot, so that no user
        waits for kernels to compile. Captured launches need no warm-up."""
        state = self.context.state
        reported = SamplingParams(logprobs=1, prompt_logprobs=1)
        for params, (start, tokens) in [
            (reported, WARM_UP[0]),
            *((SamplingParams(), each) for each in WARM_UP),
        ]:
            count = min(tokens, most)
            state.slots.length[state.dummy].fill_(start)
            scored = [0] * (count - 1) if params.logprobs else []
            rows = [Row(state.dummy, params, start + count, [0] * count, scored=scored)]
            self._prefilled(rows, self._run_prompts(rows), Stopwatch(state.device)).read()
        state.slots.length[state.dummy].fill_(1)

    def run(self, command: Command) -> Launch | None:
        """Execute any command. Returns the launch of a prefill or a step."""
        match command:
            case Admit():
                self.admit(command)
            case SetPages():
                self.set_pages(command)
            case SetDraftRows():
                self.set_draft_rows(command)
            case SetDraftTemperatures():
                self.set_draft_temperatures(command)
            case SetContinuations():
                self.set_continuations(command)
            case Prefill():
                return self.prefill(command)
            case Step():
                return self.step(command)
            case Begin():
                self.begin(command)
            case Settle():
                return self.settle(command)
        return None

    def admit(self, command: Admit) -> None:
        self.masks.admit(command.rows)
        self.context.admit(command.rows)

    def set_pages(self, command: SetPages) -> None:
        if command.runs:
            self.context.state.set_pages(command.runs)

    @torch.inference_mode()
    def prefill(self, command: Prefill) -> Launch:
        rows, stopwatch = command.rows, Stopwatch(self.context.state.device)
        result = self._replay_prompts(rows) or self._run_prompts(rows)
        return self._prefilled(rows, result, stopwatch.stop())

    def _prefilled(self, rows: Sequence[Row], result: PrefillResult, stopwatch: Stopwatch) -> Launch:
        token_B1 = result.token_B[: len(rows), None]
        packed = torch.where(result.final_B[: len(rows), None], token_B1, -1)
        packed = torch.cat([packed, torch.zeros_like(packed).expand(-1, 3)], dim=1)
        index_B1 = torch.arange(len(rows), device=token_B1.device)[:, None]
        logprobs = self._logprobs(rows, result.logits_BV, token_B1, index_B1)
        predicted_B2 = _asked(rows, result.predicted_B2)
        return Launch(packed, logprobs, rows, stopwatch, predicted_B2, scores=result.scores)

    def _replay_prompts(self, rows: Sequence[Row]) -> PrefillResult | None:
        """Replay the captured launch of this size; None if there is none."""
        size = size_for([len(row.tokens) for row in rows], list(self._prompts))
        if size is None or any(
            row.scored or (row.final and not self.masks.free_tokens(row.slot)) for row in rows
        ):
            return None
        runs = [Run(row.slot, row.tokens, row.final) for row in rows]
        return self._prompts[size].replay(runs, self.context.state.dummy)

    def _run_prompts(self, rows: Sequence[Row]) -> PrefillResult:
        counts, words_BW = [len(row.tokens) for row in rows], self.masks.after_prompts(rows)
        starts = list(accumulate(counts, initial=0))
        numbers = self._tensor([*[row.slot for row in rows], *[row.final for row in rows], *starts])
        rows_B, final_B, q_start = numbers.split([len(rows), len(rows), len(starts)])
        chunks = PromptChunks(
            token_T=self._tensor(list(chain.from_iterable(row.tokens for row in rows))),
            slot_T=torch.repeat_interleave(q_start.diff(), output_size=starts[-1]),
            q_start=q_start,
            final_B=final_B.bool(),
            longest=max(counts),
            spans=[(row.length - count, count) for row, count in zip(rows, counts, strict=True)],
            scored=self._scored(rows, counts),
            words_BW=None if words_BW is None else words_BW.to(self.context.state.device),
        )
        return prefill(self.context, self._view(rows, rows_B), chunks)

    @torch.inference_mode()
    def step(self, command: Step) -> Launch:
        rows, shape = command.rows, command.shape
        self._tell(rows)
        if any(row.masked for row in rows):
            self.begin(Begin(rows, shape))
            return self._finish(rows)
        stopwatch, slots = Stopwatch(self.context.state.device), self._slots(rows, shape)
        if (graph := self._graphs.get(shape)) is not None:
            result = graph.replay(slots)
        else:
            self._eager_steps += bool(self._graphs)
            result = step(self.context, self._view(rows, self._tensor(slots)), shape)
        return self._stepped(rows, result, stopwatch)

    @torch.inference_mode()
    def begin(self, command: Begin) -> None:
        """Queue draft and verify of a masked step."""
        rows, shape = command.rows, command.shape
        stopwatch, slots = Stopwatch(self.context.state.device), self._slots(rows, shape)
        finish: Callable[[Tensor], StepResult]
        if (graph := self._in_parts(shape)) is not None:
            nodes = NodesOnHost(graph.draft(slots))
            graph.verify()
            finish = graph.settle
        else:
            self._eager_steps += bool(self._graphs)
            drafted = draft(self.context, self._view(rows, self._tensor(slots)), shape)
            nodes = NodesOnHost(drafted.tree)
            finish = partial(settle, self.context, verify(self.context, drafted))
        self._begun = _Begun(nodes, finish, stopwatch, pinned=graph is not None and nodes.on_gpu)

    @torch.inference_mode()
    def settle(self, command: Settle) -> Launch:
        """Fill the masks of the step that was begun, and queue the rest of it."""
        assert self._begun is not None
        self._tell(command.rows)
        return self._finish(command.rows)

    def _finish(self, rows: Sequence[Row]) -> Launch:
        begun, self._begun = self._begun, None
        assert begun is not None
        words_TW, ends = self.masks.after_nodes(rows, begun.nodes, begun.pinned)
        words_TW = words_TW if begun.pinned else words_TW.to(self.context.state.device)
        return self._stepped(rows, begun.finish(words_TW), begun.stopwatch, ends)

    def _slots(self, rows: Sequence[Row], shape: StepShape) -> list[int]:
        return [*(row.slot for row in rows), *[self.context.state.dummy] * (shape.slots - len(rows))]

    def _stepped(
        self,
        rows: Sequence[Row],
        result: StepResult,
        stopwatch: Stopwatch,
        ends: Ends = NO_ENDS,
    ) -> Launch:
        stopwatch.stop()
        accepted = result.accepted
        logprobs = self._logprobs(rows, result.logits_TV, accepted.token_BS, accepted.path_BS)
        packed, predicted_B2 = accepted.packed_BX[: len(rows)], _asked(rows, result.predicted_B2)
        sources_BX = None if result.sources_BX is None else result.sources_BX[: len(rows)]
        return Launch(packed, logprobs, rows, stopwatch, predicted_B2, sources_BX=sources_BX, ends=ends)

    def _tell(self, rows: Sequence[Row]) -> None:
        """Advance constraints by the emitted tokens, and make the text that has to come next the predicted text of
        constrained requests. A step already begun follows it too, so that the next one proposes the rest."""
        self.masks.consume(rows)
        state = self.context.state
        if state.prediction is not None:
            most = min(MOST_DUE, state.prediction.tokens_RP.shape[1])
            if due := self.masks.forced(rows, most):
                state.set_predictions(due)

    @torch.inference_mode()
    def set_draft_rows(self, command: SetDraftRows) -> None:
        """Copy the rows without waiting for a launch. Captured steps, which read by address, see the change."""
        self.context.drafter.set_rows(to_device(command.rows, self.context.state.device))

    @torch.inference_mode()
    def set_draft_temperatures(self, command: SetDraftTemperatures) -> None:
        """Copy temperatures, as ``set_draft_rows`` does."""
        self.context.state.set_draft_temperatures(command.slots, command.temperatures)

    @torch.inference_mode()
    def set_continuations(self, command: SetContinuations) -> None:
        """Copy continuations, as ``set_draft_rows`` does."""
        self.context.drafter.set_continuations(command.continuations)

    def _view(self, rows: Sequence[Row], rows_B: Tensor) -> View:
        needs = Needs.of([row.params for row in rows])
        if any(row.masked for row in rows):
            needs = replace(needs, prediction=True)  # forced text
        return View.of(self.context, rows_B, max(row.length for row in rows), needs)

    def _logprobs(
        self, rows: Sequence[Row], logits: Tensor, token_BW: Tensor, index_BW: Tensor
    ) -> Logprobs | None:
        """Return the log-probabilities of the rows that request them. ``token_BW``: up to W tokens a row, -1 for none,
        chosen at rows ``index_BW`` of the logits."""
        asking = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        if not asking:
            return None
        most = max(rows[index].params.logprobs or 0 for index in asking)
        asking_A = self._tensor(asking)
        logits_NV = logits[index_BW[asking_A].flatten()]
        return token_logprobs(
            logits_NV, token_BW[asking_A].clamp(min=0).flatten(), min(most, logits.shape[1])
        )

    def _scored(self, rows: Sequence[Row], counts: Sequence[int]) -> ScoredTokens | None:
        """Return what to score of packed runs of ``counts`` tokens."""
        asking = [row for row in rows if row.scored]
        if not asking:
            return None
        starts = accumulate(counts, initial=0)
        index = [first + i for first, row in zip(starts, rows, strict=False) for i in range(len(row.scored))]
        tokens = [token for row in asking for token in row.scored]
        most = max(row.params.prompt_logprobs or 0 for row in asking)
        return ScoredTokens(self._tensor(index), self._tensor(tokens), most)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return to_device(values, self.context.state.device)
