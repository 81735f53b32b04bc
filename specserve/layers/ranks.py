"""Ranks: processes that run one model together, each with a part of every weight.

A layer kind says in its own file which sizes are shared out; what reads weights cuts the files' tensors accordingly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from specserve_kernels import Parts
from torch import Tensor

FLAG, OF_EXPERTS = "--tensor-parallel-size", "--expert-parallel-size"
Update = Tensor | Parts
"""What a block adds to the stream."""
_UNIT = 64  # vocabularies are cut at multiples of this, so that rows stay aligned


class Share(int):
    """A rank's part of a size, an integer: how much it has, and which ranges of the whole, in order. ``share * n`` has
    n numbers for each of its own; ``a + b`` is one after the other."""

    whole: int
    ranges: tuple[tuple[int, int], ...]

    def __new__(cls, whole: int, ranges: Sequence[tuple[int, int]]) -> Share:
        made = super().__new__(cls, sum(end - begin for begin, end in ranges))
        made.whole, made.ranges = whole, tuple(ranges)
        return made

    def __mul__(self, each: int) -> Share:
        return Share(self.whole * each, [(begin * each, end * each) for begin, end in self.ranges])

    __rmul__ = __mul__

    def __add__(self, other: int) -> Share:
        shifted = [(begin + self.whole, end + self.whole) for begin, end in ranges_of(other)]
        return Share(self.whole + whole_of(other), [*self.ranges, *shifted])

    def __radd__(self, other: int) -> Share:
        return Share(other, [(0, other)] if other else []) + self

    @property
    def multiple(self) -> int:
        """The largest number that all its limits are multiples of."""
        found = self.whole
        for limit in (each for limits in self.ranges for each in limits):
            while limit:
                found, limit = limit, found % limit
        return found


def whole_of(size: int) -> int:
    return size.whole if isinstance(size, Share) else size


def ranges_of(size: int) -> Sequence[tuple[int, int]]:
    return size.ranges if isinstance(size, Share) else [(0, size)]


class Along(NamedTuple):
    """What is read along one dimension of a file's tensor: ``ranges``, as if each of its numbers were ``repeat``."""

    ranges: Sequence[tuple[int, int]]
    repeat: int = 1

    @property
    def places(self) -> Tensor:
        """The indices in the file's tensor."""
        return torch.cat([torch.arange(*limits, device="cpu") for limits in self.ranges]) // self.repeat


class Cut(NamedTuple):
    """A rank's part of a file's tensor of ``shape``: along each dimension, None for all of it."""

    shape: tuple[int, ...]
    along: tuple[Along | None, ...]

    def read(self, stored: Any) -> Tensor:
        """``stored``: a tensor, or a slice of a file, of which no more is read."""
        places = [None if each is None else each.places for each in self.along]
        box = tuple(
            slice(None) if each is None else slice(int(each[0]), int(each[-1]) + 1) for each in places
        )
        found: Tensor = stored[box]
        dtype = found.dtype
        for dim, each in enumerate(places):
            if each is not None and not torch.equal(
                each - each[0], torch.arange(found.shape[dim], device="cpu")
            ):
                bytes_ = found.view(torch.uint8) if dtype.itemsize == 1 else found
                found = bytes_.index_select(dim, each - each[0]).view(dtype)
        return found


def cut_of(
    filed: Tensor, fitted: Tensor, own: Tensor, outputs: int, inputs: int, split: int = 1
) -> Cut | None:
    """Return the part that ``own`` is of ``filed``, the whole as a file has it, and ``fitted``, the whole in the rank's
    layout, of which a file's group has ``split``. Where sizes differ, they are in proportion to
    those of the outputs or inputs that are shared out. None: it is all."""
    if filed.shape == fitted.shape == own.shape:
        return None
    share = outputs if isinstance(outputs, Share) else inputs
    along: list[Along | None] = []
    for in_file, whole, mine in zip(filed.shape, fitted.shape, own.shape, strict=True):
        ranges = [(0, whole)]
        if isinstance(share, Share) and whole != mine:
            ranges = [
                (begin * whole // share.whole, end * whole // share.whole) for begin, end in share.ranges
            ]
        along.append(None if in_file == whole == mine else Along(ranges, 1 if in_file == whole else split))
    return Cut(tuple(filed.shape), tuple(along))


def summed(update_TH: Update) -> Tensor:
    """Return the sum that ``Ranks.sum_for_norm`` may have left to a norm."""
    if isinstance(update_TH, Tensor):
        return update_TH
    from specserve_kernels.ops.ranks.exchange import sum_parts

    return sum_parts(*update_TH)


class Peers(ABC):
    """The other ranks."""

    @abstractmethod
    def exchange(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in their order. All have the same shape and dtype."""

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, added in the order of ranks in at least float32, and rounded once."""
        first, *others = self.exchange(part)
        total = first.to(torch.promote_types(part.dtype, torch.float32))
        for each in others:
            total = total + each
        return total.to(part.dtype)

    def sum_for_norm(self, part_TH: Tensor) -> Update:
        """Return the sum of all ranks' parts, or what ``add_rms_norm`` takes instead of it."""
        return self.sum(part_TH)

    def join(self, own_TR: Tensor, size: int, unit: int, count: int, out: Tensor | None) -> Tensor:
        """Return ``[T, size]`` of all ``count`` ranks' columns, which are cut at multiples of ``unit``; written to
        ``out`` if given."""
        limits = (_limits(rank, count, size, unit) for rank in range(count))
        sizes = [end - begin for begin, end in limits]
        parts = self.exchange(torch.nn.functional.pad(own_TR, (0, max(sizes) - own_TR.shape[-1])))
        return torch.cat([part[:, :rows] for part, rows in zip(parts, sizes, strict=True)], -1, out=out)

    def pick(self, tokens_T: Tensor, weight_RH: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Return 0, 1, ..., and the tokens' rows ``[T, H]``, of which this rank has those from ``begin`` on."""
        own_T = (tokens_T >= begin) & (tokens_T < begin + len(weight_RH))
        rows_TH = torch.nn.functional.embedding(torch.where(own_T, tokens_T - begin, 0), weight_RH)
        found_TH = self.sum(torch.where(own_T[:, None], rows_TH, 0))
        return torch.arange(len(tokens_T), device=tokens_T.device), found_TH


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among ``count``. ``peers`` None: there are none, or nothing but shapes. ``experts``: groups
    of neighbouring ranks, each with some experts, of which a rank has some channels."""

    rank: int = 0
    count: int = 1
    peers: Peers | None = None
    experts: int = 1

    def of_experts(self) -> tuple[Ranks, Ranks]:
        """Return the place of its group among those with other experts, and its own in the group."""
        each = self.count // self.experts
        return Ranks(self.rank // each, self.experts), Ranks(self.rank % each, each)

    def share(self, size: int, name: str, repeat: bool = False, unit: int = 1, flag: str = FLAG) -> int:
        """Return this rank's part of ``size`` equal things. ``repeat``: of fewer than ranks, each is on several.
        ``unit``: they are cut at multiples of it if possible, else evenly. Raises ValueError if they can't be shared
        out."""
        rank, count = self.rank, self.count
        if count == 1 or not size:
            return size
        if repeat and count % size == 0:
            rank, count = rank * size // count, size
        if size % unit or size < unit * count:
            unit = 1
        if unit == 1 and size % count:
            also = " or divide it" if repeat else ""
            raise ValueError(f"{flag}: {name} must be a multiple of it{also}, found {self.count} and {size}")
        return Share(size, [_limits(rank, count, size, unit)])

    def vocabulary(self, size: int) -> int:
        """Return this rank's part of a vocabulary."""
        if self.count == 1:
            return size
        return Share(size, [_limits(self.rank, self.count, size, self._unit(size))])

    def _unit(self, size: int) -> int:
        return _UNIT if size >= _UNIT * self.count else 1

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, added in the order of ranks and rounded once. An element's sum depends on
        no other."""
        return part if self.peers is None else self.peers.sum(part)

    def sum_for_norm(self, part_TH: Tensor) -> Update:
        """Return the same as ``sum``, or what ``add_rms_norm`` takes instead of it."""
        return part_TH if self.peers is None else self.peers.sum_for_norm(part_TH)

    def join(self, own_TR: Tensor, size: int, out: Tensor | None = None) -> Tensor:
        """Return ``[T, size]`` of each rank's part of a vocabulary, written to ``out`` if given."""
        if self.peers is None:
            return own_TR.new_empty(len(own_TR), size) if out is None else out
        return self.peers.join(own_TR, size, self._unit(size), self.count, out)

    def pick(self, tokens_T: Tensor, weight_RH: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Return a table ``[R, H]`` and which of its rows are the tokens', of which this rank has those from ``begin``
        on."""
        if self.peers is None:
            return tokens_T, weight_RH
        return self.peers.pick(tokens_T, weight_RH, begin)

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        if self.peers is None:
            return number
        return min(int(each) for each in self.peers.exchange(torch.tensor(number)))


def _limits(rank: int, count: int, size: int, unit: int) -> tuple[int, int]:
    begin, end = (size // unit * each // count * unit for each in (rank, rank + 1))
    return begin, size if rank + 1 == count else end


ONE = Ranks()
