"""The device state of running requests: tables with one row a slot.

Shapes: R rows (slots, and last a dummy row for padding), B slots of a batch, H feature size, G page tables of M pages a
slot, V vocabulary, E bias entries.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from specserve_kernels import Prediction, SlotTables, follow_prediction
from torch import Tensor

from specserve.core import MAX_BIAS, MAX_COUNT, SamplingParams


@dataclass(slots=True)
class SamplingState:
    """Each request's sampling parameters and token counts. Floats are in the sampler's dtype."""

    temperature: Tensor  # [R]
    draft_temperature: Tensor  # [R], at which drafts are guessed
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R]
    min_p: Tensor  # [R]
    repetition: Tensor  # [R]
    frequency: Tensor  # [R]
    presence: Tensor  # [R]
    seed: Tensor  # [R] int64
    choice: Tensor  # [R] int64
    bias_ids: Tensor  # [R, E] int64, V: unused entry
    bias_values: Tensor  # [R, E]
    bias_until: Tensor  # [R, E] int64, first position at which the entry no longer counts
    bias_count: Tensor  # [R] int64, entries in use
    counts: Tensor  # [R, V] int32, occurrences in the output so far
    in_prompt: Tensor  # [R, V] bool


@dataclass(frozen=True, slots=True)
class Needs:
    """The sampling features that some request of the batch uses. The host knows them, so a CPU skips the rest; a
    captured graph computes all features and reads the rows."""

    noise: bool = True
    penalties: bool = True
    bias: bool = True
    truncation: bool = True
    prediction: bool = True

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Needs:
        sampled = [p for p in params if not p.greedy]
        return cls(
            noise=bool(sampled),
            penalties=any(
                p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 for p in params
            ),
            bias=any(p.logit_bias or p.min_tokens for p in params),
            truncation=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in sampled),
            prediction=any(p.prediction for p in params),
        )


PageRun = tuple[int, int, int, Sequence[int]]
"""Part of a slot's page table: the slot, the number of the table, the first entry, and the pages from there on."""


@dataclass(frozen=True, slots=True)
class RowInit:
    """The scheduler's data of a request that takes a slot. ``pages``: as ``PageRun``. ``stop_ids`` end it; with
    ``min_tokens``, they can't be chosen before position ``banned_until``."""

    slot: int
    pages: Sequence[PageRun]
    params: SamplingParams
    seed: int
    choice: int
    prompt: Sequence[int]
    output: Sequence[int]
    limit: int
    stop_ids: Sequence[int]
    banned_until: int
    cached: int  # tokens of the prefix found in the cache, whole pages
    last_cached_page: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """A continuation that the host looked up: ``tokens`` follow position ``base``, because the ``matched`` tokens up to
    there occur elsewhere."""

    slot: int
    base: int
    matched: int
    tokens: Sequence[int]


class DecodeState:
    """Owns the tables. The host writes only through ``admit`` and the ``set_*`` methods; steps and prefill do all other
    writes. The scalars that ``admit`` writes for every request share two tensors, so that few launches write them.

    ``positions``: of one slot, whole pages. ``tables``: page tables of a slot. ``prediction_size``: tokens of the
    longest predicted text, 0: the table does not exist. Floats of the sampler are float64 if ``dtype`` is, else
    float32."""

    def __init__(
        self,
        slots: int,
        positions: int,
        page_size: int,
        feature_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        prediction_size: int = 0,
        tables: int = 1,
    ) -> None:
        rows, sampler_dtype = slots + 1, dtype if dtype == torch.float64 else torch.float32
        self.dummy = slots
        self.device = device

        def integers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64, device=device)

        def columns(count: int, column_dtype: torch.dtype) -> Tensor:
            aligned = -(-rows // _ALIGNED) * _ALIGNED
            return torch.zeros(count, aligned, dtype=column_dtype, device=device)[:, :rows]

        # Every table begins at a multiple of 16 bytes: kernels are compiled for that.
        width = positions // page_size + (tables > 1) * (positions // page_size % 2)
        self._integers_CR = columns(8, torch.int64)
        self._floats_CR = columns(7, sampler_dtype)
        root, length, limit, draft_cap_, top_k, seed, choice, bias_count = self._integers_CR
        temperature, draft_temperature, top_p, min_p, repetition, frequency, presence = self._floats_CR
        self.slots = SlotTables(
            root=root,
            length=length,
            feature=torch.zeros(rows, feature_size, dtype=dtype, device=device),
            tokens=torch.zeros(rows, positions, dtype=torch.int32, device=device),
            pages=torch.zeros(tables, rows, width, dtype=torch.int64, device=device),
            limit=limit,
            draft_cap=draft_cap_,
        )
        self.sampling = SamplingState(
            temperature=temperature,
            draft_temperature=draft_temperature,
            top_k=top_k,
            top_p=top_p.fill_(1),
            min_p=min_p,
            repetition=repetition.fill_(1),
            frequency=frequency,
            presence=presence,
            seed=seed,
            choice=choice,
            bias_ids=integers(MAX_BIAS) + vocab_size,
            bias_values=torch.zeros(rows, MAX_BIAS, dtype=sampler_dtype, device=device),
            bias_until=integers(MAX_BIAS),
            bias_count=bias_count,
            counts=torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
            in_prompt=torch.zeros(rows, vocab_size, dtype=torch.bool, device=device),
        )
        self.prediction = Prediction.empty(rows, prediction_size, device) if prediction_size else None
        # The dummy row attends to its own position 1: a draft row must see an entry, and position 0 has none.
        self.slots.length[self.dummy] = 1

    def admit(self, rows: Sequence[RowInit], page_feature: Tensor) -> Tensor:
        """Write the rows of requests that take their slots. Return the slots, int64."""
        biases, predicted = [_bias_of(row) for row in rows], [_prediction_of(row) for row in rows]
        columns = [
            [row.slot for row in rows],
            [row.last_cached_page for row in rows],
            [len(text) for text in predicted],
            *zip(*map(_integers_of, rows, biases), strict=True),
        ]
        packed_CN = self._integers(list(chain.from_iterable(columns))).view(len(columns), len(rows))
        slots_N, page_N, predicted_N = packed_CN[:3].unbind()
        self._integers_CR.index_copy_(1, slots_N, packed_CN[3:])
        floats = zip(*(_floats_of(row.params) for row in rows), strict=True)
        floats_CN = to_device(list(chain.from_iterable(floats)), self.device, self._floats_CR.dtype)
        self._floats_CR.index_copy_(1, slots_N, floats_CN.view(-1, len(rows)))
        self.set_pages([run for row in rows for run in row.pages])
        if any(row.cached for row in rows):
            feature_NH = torch.where(page_N[:, None] > 0, page_feature[page_N], 0)
            self.slots.feature.index_copy_(0, slots_N, feature_NH)
        else:
            self.slots.feature.index_fill_(0, slots_N, 0)  # unused, but read: it must be finite
        self.sampling.bias_ids.index_fill_(0, slots_N, self.sampling.counts.shape[1])
        if self.prediction is not None:
            self.prediction.length_R.index_copy_(0, slots_N, predicted_N)
        for row, bias, text in zip(rows, biases, predicted, strict=True):
            self._admit_rest(row, bias, text)
        return slots_N

    def _admit_rest(self, row: RowInit, bias: _Bias, predicted: Sequence[int]) -> None:
        """Write what only some requests have."""
        params, slot, sampling = row.params, row.slot, self.sampling
        if row.cached:  # prefill writes the rest of the text
            known = [*row.prompt, *row.output][: row.cached]
            self.slots.tokens[slot, : row.cached] = to_device(known, self.device, torch.int32)
        if bias:
            ids, values, until = zip(*bias, strict=True)
            sampling.bias_ids[slot, : len(bias)] = self._integers(ids)
            sampling.bias_values[slot, : len(bias)] = to_device(
                values, self.device, sampling.bias_values.dtype
            )
            sampling.bias_until[slot, : len(bias)] = self._integers(until)
        if predicted and self.prediction is not None:
            self._admit_prediction(self.prediction, row, predicted)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            counts, in_prompt = sampling.counts[slot].zero_(), sampling.in_prompt[slot].zero_()
            output = self._integers(row.output)
            counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            in_prompt.index_fill_(0, self._integers(row.prompt), True)

    def _admit_prediction(self, prediction: Prediction, row: RowInit, given: Sequence[int]) -> None:
        """Write a predicted text, with the position in it that steps would have reached after all the output so far."""
        host = Prediction.empty(1, len(given), torch.device("cpu"))
        host.tokens_RP[0] = torch.tensor(given, dtype=torch.int32)
        host.length_R.fill_(len(given))
        text_1C = torch.tensor([[*row.prompt, *row.output]])
        last_1, count_1 = torch.tensor([len(row.prompt) - 1]), torch.tensor([len(row.output)])
        output_1S = torch.tensor([[*row.output, -1]])
        follow_prediction(host, text_1C, torch.tensor([0]), last_1, output_1S, count_1)
        prediction.tokens_RP[row.slot, : len(given)] = to_device(given, self.device, torch.int32)
        prediction.next_R[row.slot].fill_(int(host.next_R))
        prediction.counts_R2[row.slot] = to_device(host.counts_R2[0].tolist(), self.device, torch.float32)
        prediction.trust_R[row.slot].fill_(float(host.trust_R))

    def set_pages(self, runs: Sequence[PageRun]) -> None:
        """Write parts of slots' page tables, with one copy."""
        _, rows, width = self.slots.pages.shape
        firsts = ((table * rows + slot) * width + start for slot, table, start, _ in runs)
        entries = chain.from_iterable(
            range(first, first + len(pages)) for first, (*_, pages) in zip(firsts, runs, strict=True)
        )
        pages = chain.from_iterable(pages for *_, pages in runs)
        entry_X, page_X = self._integers([*entries, *pages]).chunk(2)
        self.slots.pages.view(-1).index_copy_(0, entry_X, page_X)

    def set_draft_temperatures(self, slots: Sequence[int], temperatures: Sequence[float]) -> None:
        """Guess the drafts of some slots at other temperatures from the next step on."""
        column_R = self.sampling.draft_temperature
        column_R.index_copy_(0, self._integers(slots), to_device(temperatures, self.device, column_R.dtype))

    def set_predictions(self, due: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Write forced text as some slots' predicted text. It goes before any draft, like a prediction always right."""
        table = self.prediction
        assert table is not None
        longest = max(len(tokens) for _, tokens in due)
        packed = chain.from_iterable(
            (slot, len(tokens), *tokens, *[0] * (longest - len(tokens))) for slot, tokens in due
        )
        slots_N, length_N, token_NP = (
            self._integers([*packed]).view(len(due), -1).split([1, 1, longest], dim=1)
        )
        slots_N, length_N = slots_N[:, 0], length_N[:, 0]
        table.tokens_RP[:, :longest].index_copy_(0, slots_N, token_NP.int())
        table.length_R.index_copy_(0, slots_N, length_N)
        table.next_R.index_copy_(0, slots_N, length_N.clamp(max=1) - 1)
        table.counts_R2.index_fill_(0, slots_N, 0)
        table.trust_R.index_fill_(0, slots_N, 0)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return to_device(values, self.device)


_ALIGNED = 16  # rows are padded to a multiple of this
_Bias = list[tuple[int, float, int]]  # token, value to add, first position without it


def _integers_of(row: RowInit, bias: _Bias) -> tuple[int, ...]:
    """Return a row's integers in the order of their table."""
    params = row.params
    root, top_k = 0, max(params.top_k, 0)
    return root, row.cached, row.limit, draft_cap(params), top_k, row.seed, row.choice, len(bias)


def _floats_of(params: SamplingParams) -> tuple[float, ...]:
    """Return a row's floats in the order of their table."""
    temperature = 0.0 if params.greedy else params.temperature
    return (
        temperature,
        temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _bias_of(row: RowInit) -> _Bias:
    """Return a row's bias entries. Those of one token add up, so a ban (-inf) hides the token's bias until it ends."""
    biases = [(token, bias, MAX_COUNT) for token, bias in (row.params.logit_bias or {}).items()]
    banned = row.stop_ids if row.params.min_tokens else ()
    return biases + [(token, -torch.inf, row.banned_until) for token in banned]


def _prediction_of(row: RowInit) -> Sequence[int]:
    given = row.params.prediction if draft_cap(row.params) else None
    assert not isinstance(given, str), "the front tokenizes predictions"
    return given or ()


def to_device(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Copy numbers to the device through pinned memory, without waiting for queued work."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    # An array converts in a quarter of the time that torch.tensor(list) takes.
    kind, wide = ("d", torch.float64) if dtype.is_floating_point else ("q", torch.int64)
    host = torch.frombuffer(array(kind, values), dtype=wide).to(dtype)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def draft_cap(params: SamplingParams) -> int:
    """Return the most nodes that may be drafted for a request in one step."""
    speculation = params.speculation
    if not speculation.enabled:
        return 0
    return MAX_COUNT if speculation.max_draft_tokens is None else speculation.max_draft_tokens
