"""The states of layers that keep one instead of keys and values: tables with one row a slot, beside the pages.

A new request counts as having no state, so nothing is written when it takes its slot, nor when it leaves.

Shapes as in ``specserve_kernels.reference.recurrent``; L layers, R rows, W places of a convolution's inputs, X numbers
about a text's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specserve_kernels import NEVER, Lagged, Left, on_gpu
from torch import Tensor

from specserve.kv.spec import BLOCK, DeltaState, zeros

LEAST_SIZE = 16  # of a key on a GPU
STOPS = 16  # tokens that end a row's text


class States:
    """The tables of all layers, which have one geometry. The last row is padding's. ``state_dtype``: of states alone,
    None: float32 or wider. ``page_size``: of the pool; a row's state serves at the end of its last page, too, unless a
    block has ended since. ``ends_RX``: as ``cut_paths`` takes it. Raises ValueError for keys that the kernel does not
    serve, and for pages at whose end a convolution's inputs might be gone."""

    def __init__(
        self,
        layers: Sequence[DeltaState],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        state_dtype: torch.dtype | None = None,
        page_size: int = 1,
    ) -> None:
        assert len(set(layers)) == 1, "one geometry for all layers"
        self.spec = spec = layers[0]
        size, wide, count = spec.key_size, torch.promote_types(dtype, torch.float32), len(layers)
        if on_gpu(device) and wide == torch.float32 and (size < LEAST_SIZE or size & (size - 1)):
            raise ValueError(
                f"linear_key_head_dim must be a power of two from {LEAST_SIZE} on with a GPU, found {size}"
            )
        if page_size < spec.width and spec.width % page_size:
            words = f"must be a divisor of linear_conv_kernel_dim, {spec.width}, or at least as large"
            raise ValueError(f"--page-size: {words}, found {page_size}")
        key, value = (spec.key_heads, spec.key_size), (spec.value_heads, spec.value_size)
        self.kept = Lagged(
            zeros(
                (count, rows, spec.value_heads, spec.key_size, spec.value_size), state_dtype or wide, device
            ),
            zeros((count, rows, 2 * BLOCK, *key), dtype, device),
            zeros((count, rows, 2 * BLOCK, *value), dtype, device),
            zeros((count, rows, 2 * BLOCK, spec.value_heads), wide, device),
        )
        self.page = max(page_size, spec.width)
        self.inputs_LRWC = zeros((count, rows, 2 * (spec.width - 1), sum(spec.parts)), dtype, device)
        self.ends_RX = torch.full((rows, 1 + STOPS), -1, dtype=torch.int64, device=device)
        self.ends_RX[:, 0] = NEVER

    def copy(self, row: int, source: States, source_row: int) -> None:
        """Overwrite a row with one of another ``States`` of the same layers."""
        ours, theirs = ((*each.kept, each.inputs_LRWC) for each in (self, source))
        for table_LRX, source_LRX in zip(ours, theirs, strict=True):
            table_LRX[:, row].copy_(source_LRX[:, source_row])

    @property
    def rings(self) -> tuple[Tensor, ...]:
        """The tables of entries and of inputs, in the order of ``Left``."""
        return *self.kept[1:], self.inputs_LRWC

    def room(self, layers: int, tokens: int) -> Left:
        """Return room for what tokens leave in some layers."""
        return Left(*(each.new_empty(layers, tokens, *each.shape[3:]) for each in self.rings))

    @property
    def entries(self) -> int:
        """Of a ring."""
        return self.kept.key_REJD.shape[2]

    @property
    def rows(self) -> int:
        return self.inputs_LRWC.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in (*self.kept, self.inputs_LRWC))
