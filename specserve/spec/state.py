"""The device state of running requests, one row a slot, and its gathered view for one batch.

Shapes: R rows (slots and a dummy one for padding, the last), B slots of a batch, H feature size, M pages a slot,
V vocabulary, E bias entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specserve_kernels import Prediction, follow_prediction
from torch import Tensor

from specserve.core import MAX_BIAS, SamplingParams
from specserve.spec.known import KnownTexts


@dataclass(slots=True)
class SlotState:
    """Where a request stands. ``root``: the token sampled last, whose K and V are not computed yet, at position
    ``length``; ``feature``: the fused feature that predicted it, of the token before."""

    root: Tensor  # [R] int64
    length: Tensor  # [R] int64, tokens whose K and V are in the pool
    feature: Tensor  # [R, H]
    pages: Tensor  # [R, M] int64
    limit: Tensor  # [R] int64, most tokens the request may have, prompt included
    draft_cap: Tensor  # [R] int64, most nodes drafted for it in a step


@dataclass(slots=True)
class SamplingState:
    """How a request's tokens are chosen. Floats are in the sampler's dtype."""

    temperature: Tensor  # [R]
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R]
    min_p: Tensor  # [R]
    repetition: Tensor  # [R]
    frequency: Tensor  # [R]
    presence: Tensor  # [R]
    seed: Tensor  # [R] int64
    choice: Tensor  # [R] int64
    bias_ids: Tensor  # [R, E] int64, holes hold V
    bias_values: Tensor  # [R, E]
    bias_until: Tensor  # [R, E] int64, first position at which the entry no longer counts
    bias_count: Tensor  # [R] int64, entries in use
    counts: Tensor  # [R, V] int32, occurrences in the output so far
    in_prompt: Tensor  # [R, V] bool


@dataclass(frozen=True, slots=True)
class Needs:
    """What some request of the batch asks for, known to the host, so that a CPU skips the rest.

    A captured graph does all and reads the rows.
    """

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


@dataclass(frozen=True, slots=True)
class RowInit:
    """What the scheduler knows of a request that takes a slot. ``banned_ids``: impossible before ``banned_until``."""

    params: SamplingParams
    seed: int
    choice: int
    prompt: Sequence[int]
    output: Sequence[int]
    limit: int
    banned_ids: Sequence[int]
    banned_until: int
    cached: int  # tokens of the prefix found in the cache, whole pages
    last_cached_page: int


class DecodeState:
    """Owns the tables. ``admit`` and ``set_pages`` are the host's only writes; steps and prefill make the others.

    ``prediction_size``: tokens of the longest predicted text, 0 where nothing is drafted: then there is no table.
    """

    def __init__(
        self,
        slots: int,
        pages_per_slot: int,
        feature_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        sampler_dtype: torch.dtype,
        device: torch.device,
        prediction_size: int = 0,
    ) -> None:
        rows = slots + 1
        self.dummy = slots
        self.device = device

        def integers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=sampler_dtype, device=device)

        self.slots = SlotState(
            root=integers(),
            length=integers(),
            feature=torch.zeros(rows, feature_size, dtype=dtype, device=device),
            pages=integers(pages_per_slot),
            limit=integers(),
            draft_cap=integers(),
        )
        self.sampling = SamplingState(
            temperature=floats(),
            top_k=integers(),
            top_p=floats() + 1,
            min_p=floats(),
            repetition=floats() + 1,
            frequency=floats(),
            presence=floats(),
            seed=integers(),
            choice=integers(),
            bias_ids=integers(MAX_BIAS) + vocab_size,
            bias_values=floats(MAX_BIAS),
            bias_until=integers(MAX_BIAS),
            bias_count=integers(),
            counts=torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
            in_prompt=torch.zeros(rows, vocab_size, dtype=torch.bool, device=device),
        )
        self.prediction = Prediction.empty(rows, prediction_size, device) if prediction_size else None
        self.known: KnownTexts | None = None
        # The dummy row attends to its own position 1: a draft row must see an entry, and slot 0 has none.
        self.slots.length[self.dummy] = 1

    def know_texts(self, end: int) -> KnownTexts:
        """Steps that are captured or run from now on write texts that are known, up to position ``end``. Once: captured
        steps keep the table's address."""
        assert self.known is None
        self.known = KnownTexts(len(self.slots.root), end, self.device)
        return self.known

    def admit(self, slot: int, row: RowInit, page_feature: Tensor) -> None:
        """Writes a request's row. Its pages follow by ``set_pages``."""
        params, table, sampling = row.params, self.slots, self.sampling
        table.length[slot].fill_(row.cached)
        table.limit[slot].fill_(row.limit)
        table.draft_cap[slot].fill_(draft_cap(params))
        table.root[slot].fill_(0)
        if row.cached:
            table.feature[slot] = page_feature[row.last_cached_page]
        else:
            table.feature[slot].fill_(0)  # read, though of no use, and must be finite
        sampling.temperature[slot].fill_(0.0 if params.greedy else params.temperature)
        sampling.top_k[slot].fill_(max(params.top_k, 0))
        sampling.top_p[slot].fill_(params.top_p)
        sampling.min_p[slot].fill_(params.min_p)
        sampling.repetition[slot].fill_(params.repetition_penalty)
        sampling.frequency[slot].fill_(params.frequency_penalty)
        sampling.presence[slot].fill_(params.presence_penalty)
        sampling.seed[slot].fill_(row.seed)
        sampling.choice[slot].fill_(row.choice)
        self._admit_bias(slot, row)
        self._admit_prediction(slot, row)
        if self.known is not None:
            self.known.admit(slot, row.prompt, params, row.choice, row.output)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            counts, in_prompt = sampling.counts[slot].zero_(), sampling.in_prompt[slot].zero_()
            output = self._integers(row.output)
            counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            in_prompt.index_fill_(0, self._integers(row.prompt), True)

    def _admit_bias(self, slot: int, row: RowInit) -> None:
        # Entries of one token add up, so a ban (-inf) hides a bias beside it until the ban ends.
        rows = [(token, bias, _FOREVER) for token, bias in (row.params.logit_bias or {}).items()]
        rows += [(token, -torch.inf, row.banned_until) for token in row.banned_ids]
        sampling = self.sampling
        sampling.bias_ids[slot].fill_(sampling.counts.shape[1])
        sampling.bias_count[slot].fill_(len(rows))
        if rows:
            ids, values, until = zip(*rows, strict=True)
            sampling.bias_ids[slot, : len(rows)] = self._integers(ids)
            sampling.bias_values[slot, : len(rows)] = to_device(
                values, self.device, sampling.bias_values.dtype
            )
            sampling.bias_until[slot, : len(rows)] = self._integers(until)

    def _admit_prediction(self, slot: int, row: RowInit) -> None:
        """Its place is found as a step would find it that had emitted all the output."""
        if self.prediction is None:
            return
        given = row.params.prediction if draft_cap(row.params) else None
        assert not isinstance(given, str), "the front tokenizes predictions"
        self.prediction.length_R[slot].fill_(len(given or ()))
        if not given:
            return
        host = Prediction.empty(1, len(given), torch.device("cpu"))
        host.tokens_RP[0] = torch.tensor(given, dtype=torch.int32)
        host.length_R.fill_(len(given))
        output_1S, count_1 = torch.tensor([[*row.output, -1]]), torch.tensor([len(row.output)])
        follow_prediction(host, torch.tensor([0]), output_1S, count_1)
        self.prediction.tokens_RP[slot, : len(given)] = to_device(given, self.device, torch.int32)
        self.prediction.recent_RN[slot] = self._integers(host.recent_RN[0].tolist())
        self.prediction.next_R[slot].fill_(int(host.next_R))
        self.prediction.counts_R2[slot] = to_device(host.counts_R2[0].tolist(), self.device, torch.float32)
        self.prediction.trust_R[slot].fill_(float(host.trust_R))

    def set_pages(self, slot: int, start: int, pages: Sequence[int]) -> None:
        """Writes part of a slot's page table, from entry ``start`` on."""
        self.slots.pages[slot, start : start + len(pages)] = self._integers(pages)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return to_device(values, self.device)


_FOREVER = 2**62


def to_device(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Copies numbers to the device without waiting for what is queued there: from pinned memory."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def draft_cap(params: SamplingParams) -> int:
    """Most nodes that may be drafted for a request in one step."""
    speculation = params.speculation
    if not speculation.enabled:
        return 0
    return _FOREVER if speculation.max_draft_tokens is None else speculation.max_draft_tokens
