"""Runs prefill and steps on the device and hands their results back without waiting for them.

Shapes: B requests, S draft levels, T packed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from specserve.core import SamplingParams, TokenLogprob
from specserve.engine.commands import Admit, Command, Prefill, Row, SetDraftRows, SetPages, Step
from specserve.engine.grammars import Grammars, Matcher, Words
from specserve.engine.graphs import PromptGraph, StepGraph
from specserve.engine.prompts import PromptSize, Run, size_for
from specserve.speculation.context import Context, View
from specserve.speculation.logprobs import Logprobs, token_logprobs
from specserve.speculation.prefill import PrefillResult, PromptChunks, Scored, prefill
from specserve.speculation.sampler import Allowed
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs, to_device
from specserve.speculation.step import StepResult, plant_and_verify, settle, step

# First positions and tokens: of more than 64, and of more than 96, projections take other kernels, and so does
# attention after a prefix, for more than 64 again; of many tokens cuBLAS takes others.
WARM_UP = ((0, 72), (1, 64), (1, 128), (1, 1024))


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a launch gave one request."""

    tokens: list[int]
    drafted: int
    chain: int  # how far its tree held what a chain would have drafted
    firsts: int  # how many of those nodes were accepted
    logprobs: list[TokenLogprob] | None
    scores: list[TokenLogprob]  # of the row's scored prompt tokens
    predicted: range = range(0)  # of the request's prediction: what its tokens are, from the first on
    sources: Sequence[int] = ()  # of each source tokens tested, of these right, and accepted


class Stopwatch:
    """Times what is queued between its making and ``stop``: on the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else None
        self._begin = self._end = time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> Stopwatch:
        self._end = time.perf_counter()
        if self._events is not None:
            self._events[1].record()
        return self

    @property
    def seconds(self) -> float:
        if self._events is None:
            return self._end - self._begin
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class Launch:
    """Work queued on the device. ``read`` waits for it; nothing else does."""

    def __init__(
        self,
        packed: Tensor,
        logprobs: Logprobs | None,
        rows: Sequence[Row],
        stopwatch: Stopwatch | None = None,
        predicted_B2: Tensor | None = None,
        scores: Logprobs | None = None,
        sources_BX: Tensor | None = None,
    ) -> None:
        """``packed`` ``[B, S + 4]``: tokens, -1 beyond the end, then nodes drafted, first choices and those accepted;
        ``predicted_B2``: as in a step's result, None where nobody has a prediction; ``scores``: of the scored prompt
        tokens, by row; ``sources_BX``: as in a step's result."""
        self._rows = rows
        self._stopwatch = stopwatch
        self._packed = _to_host(packed)
        self._logprobs, self._scores = _on_host(logprobs), _on_host(scores)
        self._predicted = None if predicted_B2 is None else _to_host(predicted_B2)
        self._sources = None if sources_BX is None else _to_host(sources_BX)
        self._event = torch.cuda.Event() if packed.is_cuda else None
        if self._event is not None:
            self._event.record()

    @property
    def seconds(self) -> float:
        """What the device worked on a step, once it has been read."""
        assert self._stopwatch is not None, "prefill is not timed"
        return self._stopwatch.seconds

    def read(self) -> list[Emitted]:
        """One entry a row, in the order of the launch."""
        if self._event is not None:
            self._event.synchronize()
        out, reported, scored = [], 0, 0
        nothing = [(0, 0)] * len(self._rows)
        predicted = nothing if self._predicted is None else self._predicted.tolist()
        sources = [()] * len(self._rows) if self._sources is None else self._sources.tolist()
        entries = zip(self._rows, self._packed.tolist(), predicted, sources, strict=True)
        for row, entry, (first, count), told in entries:
            *chosen, drafted, chain, firsts = entry
            tokens = [token for token in chosen if token >= 0]
            logprobs = None
            if row.params.logprobs is not None:
                logprobs = _row_logprobs(self._logprobs, row.params.logprobs, tokens, reported)
                reported += len(chosen)
            scores = []
            if row.scored:
                scores = _row_logprobs(self._scores, row.params.prompt_logprobs or 0, row.scored, scored)
                scored += len(row.scored)
            foretold = range(first, first + count)
            out.append(Emitted(tokens, drafted, chain, firsts, logprobs, scores, foretold, told))
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
    return _to_host(own), _to_host(values), _to_host(ids)


def _asked(rows: Sequence[Row], predicted_B2: Tensor | None) -> Tensor | None:
    """Those of the rows, None if none of them has a prediction."""
    if predicted_B2 is None or not any(row.params.prediction for row in rows):
        return None
    return predicted_B2[: len(rows)]


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


class Runner:
    """The only door to the device while serving. Commands are queued in order; state and cache change in that order."""

    def __init__(
        self,
        context: Context,
        graphs: Mapping[StepShape, StepGraph],
        prompts: Mapping[PromptSize, PromptGraph] | None = None,
        capture_next: Callable[[], bool] = lambda: False,
    ) -> None:
        """``graphs``: the shapes whose steps are captured; ``prompts``: the sizes of short launches of prompts that
        are. Others run eagerly. ``capture_next`` captures one more, if one was left for a time without requests."""
        self.context = context
        self.capture_next = capture_next
        self.eager_steps = 0  # of those that graphs were captured for
        self._graphs = graphs
        self._prompts = prompts or {}
        self.grammars: Grammars | None = None  # with one, requests may have grammars
        self.failed: dict[int, str] = {}  # slots whose grammars can't follow their answers, and why
        self._matchers: dict[int, Matcher] = {}  # by slot

    @torch.inference_mode()
    def warm_up(self, most: int) -> None:
        """Runs prompts of up to ``most`` tokens, fewer than a context has, on the padding slot, so that no user waits
        for kernels to compile. Of no use are captured launches, whose kernels have been."""
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
            self._prefilled(rows, self._run_prompts(rows)).read()
        state.slots.length[state.dummy].fill_(1)

    def run(self, command: Command) -> Launch | None:
        """Do what any command says. Returns the launch of a prefill or a step."""
        match command:
            case Admit():
                self.admit(command)
            case SetPages():
                self.set_pages(command)
            case SetDraftRows():
                self.set_draft_rows(command)
            case Prefill():
                return self.prefill(command)
            case Step():
                return self.step(command)
        return None

    def admit(self, command: Admit) -> None:
        for row in command.rows:
            self._matchers.pop(row.slot, None)
            self.failed.pop(row.slot, None)
            if row.params.grammar is not None:
                assert self.grammars is not None, "admission refuses grammars without"
                with self._failing(row.slot, row.params):
                    self._matchers[row.slot] = self.grammars.start(row.params.grammar, row.output)
        self.context.state.admit(command.rows, self.context.pool.page_feature)

    def set_pages(self, command: SetPages) -> None:
        self.context.state.set_pages(command.slot, command.start, command.pages)

    @torch.inference_mode()
    def prefill(self, command: Prefill) -> Launch:
        rows = command.rows
        return self._prefilled(rows, self._replay_prompts(rows) or self._run_prompts(rows))

    def _prefilled(self, rows: Sequence[Row], result: PrefillResult) -> Launch:
        token_B1 = result.token_B[: len(rows), None]
        packed = torch.where(result.final_B[: len(rows), None], token_B1, -1)
        packed = torch.cat([packed, torch.zeros_like(packed).expand(-1, 3)], dim=1)
        index_B1 = torch.arange(len(rows), device=token_B1.device)[:, None]
        logprobs = self._logprobs(rows, result.logits_BV, token_B1, index_B1)
        predicted_B2 = _asked(rows, result.predicted_B2)
        return Launch(packed, logprobs, rows, predicted_B2=predicted_B2, scores=result.scores)

    def _replay_prompts(self, rows: Sequence[Row]) -> PrefillResult | None:
        """None for a launch that was not captured."""
        size = size_for([len(row.tokens) for row in rows], list(self._prompts))
        if size is None or any(row.scored or (row.final and row.params.grammar) for row in rows):
            return None
        runs = [Run(row.slot, row.tokens, row.final) for row in rows]
        return self._prompts[size].replay(runs, self.context.state.dummy)

    def _run_prompts(self, rows: Sequence[Row]) -> PrefillResult:
        counts = [len(row.tokens) for row in rows]
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
            allowed=self._first_allowed(rows),
        )
        return prefill(self.context, self._view(rows, rows_B), chunks)

    @torch.inference_mode()
    def step(self, command: Step) -> Launch:
        rows, shape = command.rows, command.shape
        padding = [self.context.state.dummy] * (shape.slots - len(rows))
        slots = [*(row.slot for row in rows), *padding]
        stopwatch = Stopwatch(self.context.state.device)
        graph = self._graphs.get(shape)
        if any(row.slot in self._matchers for row in rows):
            result = self._constrained(rows, slots, shape)
        elif graph is not None:
            result = graph.replay(slots)
        else:
            self.eager_steps += bool(self._graphs)
            result = step(self.context, self._view(rows, self._tensor(slots)), shape)
        stopwatch.stop()
        accepted = result.accepted
        logprobs = self._logprobs(rows, result.logits_TV, accepted.token_BS, accepted.path_BS)
        packed, predicted_B2 = accepted.packed_BX[: len(rows)], _asked(rows, result.predicted_B2)
        told = None if result.sources_BX is None else result.sources_BX[: len(rows)]
        return Launch(packed, logprobs, rows, stopwatch, predicted_B2, sources_BX=told)

    def _constrained(self, rows: Sequence[Row], slots: list[int], shape: StepShape) -> StepResult:
        """A step in two halves: between them the host looks what may follow each node of the trees."""
        verified = plant_and_verify(self.context, self._view(rows, self._tensor(slots)), shape)
        tree = verified.tree
        index: list[int] = []
        masks: list[Words] = []
        packed = torch.cat([tree.token_T, tree.parent_T, tree.q_start]).tolist()
        tokens, parents, starts = (
            packed[: shape.nodes], packed[shape.nodes : 2 * shape.nodes], packed[2 * shape.nodes :]
        )  # fmt: skip
        for number, row in enumerate(rows):
            if (matcher := self._matchers.get(row.slot)) is None:
                continue
            begin, end = starts[number], starts[number + 1]
            with self._failing(row.slot, row.params):
                matcher.consume(row.tokens)
                masks.append(matcher.masks(tokens[begin:end], [each - begin for each in parents[begin:end]]))
                index += range(begin, end)
        return settle(self.context, verified, self._allowed(index, masks))

    def _first_allowed(self, rows: Sequence[Row]) -> Allowed | None:
        """What the answers may begin with whose prompts end here."""
        index, masks = [], []
        for number, row in enumerate(rows):
            if row.final and (matcher := self._matchers.get(row.slot)) is not None:
                with self._failing(row.slot, row.params):
                    masks.append(matcher.mask()[None])
                    index.append(number)
        return self._allowed(index, masks)

    def _allowed(self, index: list[int], masks: list[Words]) -> Allowed | None:
        """Of rows ``index`` of the logits, from words of bits."""
        if not index:
            return None
        bytes_NW = torch.from_numpy(np.concatenate(masks)).view(torch.uint8).to(self.context.state.device)
        bits = torch.arange(8, dtype=torch.uint8, device=bytes_NW.device)
        allowed_NV = ((bytes_NW[:, :, None] >> bits) & 1).flatten(1)[:, : self.context.vocab_size].bool()
        return Allowed(self._tensor(index), allowed_NV)

    @contextmanager
    def _failing(self, slot: int, params: SamplingParams) -> Iterator[None]:
        """Note whose grammar can't follow its answer; it gets no more tokens of use."""
        try:
            yield
        except ValueError as error:
            self._matchers.pop(slot, None)
            self.failed[slot] = str(error)
            if self.grammars is not None and params.grammar is not None:
                self.grammars.forget(params.grammar)

    @torch.inference_mode()
    def set_draft_rows(self, command: SetDraftRows) -> None:
        """Copied from pinned memory: no launch is waited for, and captured steps, which address the tensors that
        change, see them."""
        self.context.drafter.pick(to_device(command.rows, self.context.state.device))

    def _view(self, rows: Sequence[Row], rows_B: Tensor) -> View:
        needs = Needs.of([row.params for row in rows])
        return View.of(self.context, rows_B, max(row.length for row in rows), needs)

    def _logprobs(
        self, rows: Sequence[Row], logits: Tensor, token_BW: Tensor, index_BW: Tensor
    ) -> Logprobs | None:
        """Of the rows that ask for them: ``token_BW`` are up to W tokens a row, -1 for none, chosen at rows
        ``index_BW`` of the logits."""
        asking = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        if not asking:
            return None
        most = max(rows[index].params.logprobs or 0 for index in asking)
        asking_A = self._tensor(asking)
        logits_NV = logits[index_BW[asking_A].flatten()]
        return token_logprobs(
            logits_NV, token_BW[asking_A].clamp(min=0).flatten(), min(most, logits.shape[1])
        )

    def _scored(self, rows: Sequence[Row], counts: Sequence[int]) -> Scored | None:
        """What is to be scored of packed runs of ``counts`` tokens."""
        asking = [row for row in rows if row.scored]
        if not asking:
            return None
        starts = accumulate(counts, initial=0)
        index = [first + i for first, row in zip(starts, rows, strict=False) for i in range(len(row.scored))]
        tokens = [token for row in asking for token in row.scored]
        most = max(row.params.prompt_logprobs or 0 for row in asking)
        return Scored(self._tensor(index), self._tensor(tokens), most)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return to_device(values, self.context.state.device)
