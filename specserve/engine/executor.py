"""Execute commands on this process's device, and return results without waiting for them.

Shapes: B requests, S draft levels, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from specserve.constraints.masks import Ends, NodesOnHost
from specserve.core import SamplingParams
from specserve.engine import commands
from specserve.engine.commands import Command, Row
from specserve.engine.graphs import Graphs
from specserve.engine.launch import NO_ENDS, Launch
from specserve.engine.profile import Stopwatch, eager_seconds, replay_seconds
from specserve.engine.prompts import size_for
from specserve.speculation.context import Context, View
from specserve.speculation.logprobs import Logprobs, token_logprobs
from specserve.speculation.prefill import PrefillResult, PromptChunks, ScoredTokens, prefill
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Needs, to_device
from specserve.speculation.step import StepResult, draft, settle, step, verify

# (first position, tokens) of warm-up prompts. Projections use other kernels above 64 and above 96 tokens, and cuBLAS
# others for many tokens; attention has one kernel with a prefix and one without.
WARM_UP = ((0, 72), (1, 64), (1, 128), (1, 1024))


@dataclass(frozen=True, slots=True)
class Begun:
    """A masked step whose target is running. ``finish`` takes the masks, in pinned memory if ``pinned``."""

    nodes: NodesOnHost
    finish: Callable[[Tensor], StepResult]
    stopwatch: Stopwatch
    pinned: bool


class Executor:
    """The only access to the device while serving, for reads too. Commands are queued in order; state and cache change
    in that order, and alike in every process that is given the same ones: nothing here decides by time, by chance or
    by what only one process knows."""

    def __init__(self, context: Context, graphs: Graphs | None = None) -> None:
        """What is not in ``graphs`` runs eagerly."""
        self.context = context
        self.graphs = Graphs({}) if graphs is None else graphs
        self._eager_steps = 0
        self._begun: Begun | None = None

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
            self._prefilled(rows, self._run_prompts(commands.Prefill(rows)), Stopwatch(state.device)).read()
        state.slots.length[state.dummy].fill_(1)

    def run(self, command: Command) -> Launch | None:
        """Execute any command. Returns the launch of a prefill or a step."""
        match command:
            case commands.Prefill():
                return self.prefill(command)
            case commands.Step():
                return self.step(command)
            case commands.Settle():
                return self.settle(command)
            case commands.Begin():
                self.begin(command)
            case commands.Measure():
                self.measure(command)
            case _:
                self.change(command)
        return None

    @torch.inference_mode()
    def change(self, command: commands.Change) -> None:
        """Write state without waiting for a launch. Captured steps, which read by address, see the change."""
        context, state = self.context, self.context.state
        match command:
            case commands.Admit():
                context.admit(command.rows)
            case commands.SetPages():
                state.set_pages(command.runs)
            case commands.CopyStates():
                self._copy_states(command)
            case commands.CatchUp():
                self._catch_up(command.slots)
            case commands.SetPredictions():
                state.set_predictions(command.due)
            case commands.SetDraftRows():
                context.drafter.set_rows(to_device(command.rows, state.device))
            case commands.SetDraftTemperatures():
                state.set_draft_temperatures(command.slots, command.temperatures)
            case commands.SetContinuations():
                context.drafter.set_continuations(command.continuations)

    def _copy_states(self, command: commands.CopyStates) -> None:
        states, snapshots = self.context.states, self.context.snapshots
        assert states is not None
        assert snapshots is not None
        for slot, number in command.pairs:
            if command.back:
                states.copy(slot, snapshots, number - 1)
            else:
                snapshots.copy(number - 1, states, slot)

    def _catch_up(self, slots: Sequence[int]) -> None:
        context, graphs = self.context, self.graphs.catch_ups
        if size := min((size for size in graphs if size >= len(slots)), default=0):
            graphs[size].replay([*slots, *[context.state.dummy] * (size - len(slots))])
        else:
            context.drafter.catch_up(context, View.of(context, self._tensor(slots), 0, Needs()))

    @torch.inference_mode()
    def measure(self, command: commands.Measure) -> float:
        """Return the seconds of a step: of its graph, if there is one, behind as little as possible."""
        if (graph := self.graphs.steps.get(command.shape)) is not None:
            return replay_seconds(self.context, command.shape, graph)
        return eager_seconds(self.context, command.shape, command.length)

    @torch.inference_mode()
    def prefill(self, command: commands.Prefill) -> Launch:
        rows, stopwatch = command.rows, Stopwatch(self.context.state.device)
        result = self._replay_prompts(command) or self._run_prompts(command)
        return self._prefilled(rows, result, stopwatch.stop())

    def _prefilled(self, rows: Sequence[Row], result: PrefillResult, stopwatch: Stopwatch) -> Launch:
        token_B1 = result.token_B[: len(rows), None]
        packed = torch.where(result.final_B[: len(rows), None], token_B1, -1)
        packed = torch.cat([packed, torch.zeros_like(packed).expand(-1, 3)], dim=1)
        index_B1 = torch.arange(len(rows), device=token_B1.device)[:, None]
        logprobs = self._logprobs(rows, result.logits_BV, token_B1, index_B1)
        predicted_B2 = _asked(rows, result.predicted_B2)
        return Launch(packed, logprobs, rows, stopwatch, predicted_B2, scores=result.scores)

    def _replay_prompts(self, command: commands.Prefill) -> PrefillResult | None:
        """Replay the captured launch of this size; None if there is none."""
        rows = command.rows
        size = size_for([len(row.tokens) for row in rows], list(self.graphs.prompts))
        if size is None or any(row.scored for row in rows):
            return None
        return self.graphs.prompts[size].replay(rows, self.context.state.dummy, command.words)

    def _run_prompts(self, command: commands.Prefill) -> PrefillResult:
        rows = command.rows
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
            words_BW=None if command.words is None else command.words.to(self.context.state.device),
        )
        return prefill(self.context, self._view(rows, rows_B), chunks)

    @torch.inference_mode()
    def step(self, command: commands.Step) -> Launch:
        rows, shape = command.rows, command.shape
        stopwatch, slots = Stopwatch(self.context.state.device), self._slots(rows, shape)
        if (graph := self.graphs.steps.get(shape)) is not None:
            result = graph.replay(slots)
        else:
            self._eager_steps += bool(self.graphs.steps)
            result = step(self.context, self._view(rows, self._tensor(slots)), shape)
        return self._stepped(rows, result, stopwatch)

    @torch.inference_mode()
    def begin(self, command: commands.Begin) -> None:
        """Queue draft and verify of a masked step."""
        rows, shape = command.rows, command.shape
        stopwatch, slots = Stopwatch(self.context.state.device), self._slots(rows, shape)
        finish: Callable[[Tensor], StepResult]
        if (graph := self.graphs.in_parts(shape)) is not None:
            nodes = NodesOnHost(graph.draft(slots))
            graph.verify()
            finish = graph.settle
        else:
            self._eager_steps += bool(self.graphs.steps)
            drafted = draft(self.context, self._view(rows, self._tensor(slots)), shape)
            nodes = NodesOnHost(drafted.tree)
            finish = partial(settle, self.context, verify(self.context, drafted))
        self._begun = Begun(nodes, finish, stopwatch, pinned=graph is not None and nodes.on_gpu)

    @torch.inference_mode()
    def settle(self, command: commands.Settle, ends: Ends = NO_ENDS) -> Launch:
        """Queue the rest of the step that was begun. ``ends``: where answers fail."""
        begun, self._begun = self._begun, None
        assert begun is not None
        assert command.words is not None
        words_TW = command.words if begun.pinned else command.words.to(self.context.state.device)
        return self._stepped(command.rows, begun.finish(words_TW), begun.stopwatch, ends)

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


def _asked(rows: Sequence[Row], predicted_B2: Tensor | None) -> Tensor | None:
    """Return the rows' part of the table, None if no row can have a predicted text."""
    if predicted_B2 is None or not any(row.params.prediction or row.masked for row in rows):
        return None
    return predicted_B2[: len(rows)]
