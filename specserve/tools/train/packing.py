"""Pack documents into rows of equal length and draw batches from them.

Shapes: R rows of a source, B rows of a batch, S row length.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specserve.tools.train.attend import Packing

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Documents:
    """Token ids of many documents end to end, with a mask of the tokens that are trained on.

    ``tokens`` and ``mask`` have one entry per token; ``starts`` int64 ``[documents + 1]`` ends with the token count.
    """

    tokens: Array
    mask: Array
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def select(self, ids: npt.NDArray[np.int64]) -> Documents:
        """Return the documents ``ids``, in that order."""
        lengths = (self.starts[1:] - self.starts[:-1])[ids]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        offset = np.repeat(self.starts[:-1][ids] - starts[:-1], lengths)
        index = np.arange(starts[-1]) + offset
        return Documents(self.tokens[index], self.mask[index], starts)

    def split(self, share: float, most: int, seed: int) -> tuple[Documents, Documents]:
        """Set aside ``share`` of the documents (at least 1, at most ``most``). Return the rest and those set aside."""
        if len(self) < 2:
            raise ValueError("holding documents out needs at least 2 of them; give --heldout instead")
        order = np.random.default_rng(seed).permutation(len(self))
        count = min(max(1, round(len(self) * share)), most, len(self) - 1)
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))


def identity(sources: Sequence[Documents]) -> str:
    """Return a short text that differs for other tokens, masks, documents or orders of sources. Files do not matter."""
    digest = hashlib.sha256()
    for each in sources:
        for array in (each.starts, each.tokens.astype(np.int32), each.mask):  # files have tokens of any type
            digest.update(np.ascontiguousarray(array).data)
    return f"{sum(map(len, sources))} documents, {digest.hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows: ``tokens`` int32 and ``mask`` bool ``[R, S]``; ``starts[r]``: where row r's documents begin."""

    tokens: Tensor
    mask: Tensor
    starts: list[npt.NDArray[np.int64]]

    def __len__(self) -> int:
        return self.tokens.shape[0]


def pack(documents: Documents, row_length: int, seed: int) -> Rows:
    """Pack whole documents into rows by best fit, in random order; longer ones are first cut into windows.

    The unused end of a row is a document of its own whose mask is 0.
    """
    pieces = _pieces(documents, row_length)
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (room left, row), sorted
    for piece in rng.permutation(len(pieces)):
        length = int(pieces[piece, 1])
        found = bisect.bisect_left(spaces, (length, 0))
        if found == len(spaces):
            room, row = row_length, len(rows)
            rows.append([])
        else:
            room, row = spaces.pop(found)
        rows[row].append(int(piece))
        if room > length:
            bisect.insort(spaces, (room - length, row))
    return _fill(documents, pieces, [rows[r] for r in rng.permutation(len(rows))], row_length)


def _pieces(documents: Documents, row_length: int) -> npt.NDArray[np.int64]:
    """Return (start, length) of every document or window, int64 ``[pieces, 2]``."""
    begin, lengths = documents.starts[:-1], documents.starts[1:] - documents.starts[:-1]
    windows = -(-lengths // row_length)
    first = np.concatenate([[0], np.cumsum(windows)])[:-1]
    inside = (np.arange(windows.sum()) - np.repeat(first, windows)) * row_length
    length = np.minimum(row_length, np.repeat(lengths, windows) - inside)
    return np.stack([np.repeat(begin, windows) + inside, length], axis=1)


def _fill(
    documents: Documents, pieces: npt.NDArray[np.int64], rows: list[list[int]], row_length: int
) -> Rows:
    tokens = np.zeros((len(rows), row_length), np.int32)
    mask = np.zeros((len(rows), row_length), bool)
    starts = []
    for r, row in enumerate(rows):
        at, begins = 0, []
        for start, length in pieces[row].tolist():
            tokens[r, at : at + length] = documents.tokens[start : start + length]
            mask[r, at : at + length] = documents.mask[start : start + length]
            begins.append(at)
            at += length
        starts.append(np.array(begins + ([at] if at < row_length else []), np.int64))
    return Rows(torch.from_numpy(tokens), torch.from_numpy(mask), starts)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows on the device, flattened: ``tokens`` int64, ``mask`` bool, ``positions`` int64 (in the row), ``[T]``."""

    tokens_T: Tensor
    mask_T: Tensor
    positions_T: Tensor
    packing: Packing


def make_batch(
    parts: Sequence[tuple[Rows, npt.NDArray[np.int64]]], device: torch.device, flash: bool
) -> Batch:
    """Gather the chosen rows of each source into one batch."""
    tokens = torch.cat([rows.tokens[torch.from_numpy(chosen)] for rows, chosen in parts])
    mask = torch.cat([rows.mask[torch.from_numpy(chosen)] for rows, chosen in parts])
    count, length = tokens.shape
    starts = [rows.starts[r] for rows, chosen in parts for r in chosen]
    cu = np.concatenate([s + i * length for i, s in enumerate(starts)] + [np.array([count * length])])
    packing = Packing(_move(torch.from_numpy(cu.astype(np.int32)), device), length, flash)
    torch._dynamo.maybe_mark_dynamic(packing.cu_seqlens, 0)
    positions = torch.arange(length, device=device).repeat(count)
    return Batch(_move(tokens.flatten(), device).long(), _move(mask.flatten(), device), positions, packing)


def _move(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class RowSampler:
    """Draw batch k of an endless stream: rows from every source by share, reshuffled at every pass over it.

    Stateless, so a resumed run gets the batches of an uninterrupted one.
    """

    def __init__(
        self,
        sources: Sequence[Rows],
        shares: Sequence[float] | None,
        batch_rows: int,
        seed: int,
        device: torch.device,
        flash: bool,
    ) -> None:
        self.sources, self.batch_rows, self.seed = list(sources), batch_rows, seed
        self.device, self.flash = device, flash
        counts = [float(len(rows)) for rows in sources] if shares is None else list(shares)
        if len(counts) != len(self.sources) or min(counts) < 0 or sum(counts) <= 0:
            raise ValueError(
                f"give one share >= 0 for each of the {len(self.sources)} sources, found {counts}"
            )
        self.ends = np.cumsum(counts) / sum(counts)
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def drawn(self, batch: int) -> list[int]:
        """Return how many rows of each source come before batch ``batch``."""
        ends = np.floor(self.ends * batch * self.batch_rows + 1e-6).astype(np.int64)
        return [int(n) for n in np.diff(ends, prepend=0)]

    def __call__(self, batch: int) -> Batch:
        before, after = self.drawn(batch), self.drawn(batch + 1)
        parts = [
            (rows, np.array([self._row(s, n) for n in range(before[s], after[s])], np.int64))
            for s, rows in enumerate(self.sources)
        ]
        return make_batch(parts, self.device, self.flash)

    def _row(self, source: int, number: int) -> int:
        epoch, index = divmod(number, len(self.sources[source]))
        if (source, epoch) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] != source}
            rng = np.random.default_rng([self.seed, source, epoch])
            self._orders[source, epoch] = rng.permutation(len(self.sources[source]))
        return int(self._orders[source, epoch][index])
