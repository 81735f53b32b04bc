"""Embed the tensors of a small model in the shape of a large one; ``cost_faithful.py`` explains why.

Shapes: d, D small and wide hidden size; R, C rows and columns of a small matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from specserve.layers.decoder import LayerConfig

MARK, REPEL = 2.0**-10, 2.0**20  # powers of two: exact in bfloat16
NOISE = 0.02
Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the large family; the drafts have one layer of the same geometry."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int

    def layer(self, small: LayerConfig) -> LayerConfig:
        """The geometry of a layer; eps makes up for the wider mean and for ``MARK`` in it."""
        eps = (small.rms_norm_eps * small.hidden_size - MARK**2) / self.hidden
        return LayerConfig(
            self.hidden, self.inner, self.heads, self.kv_heads, self.head_dim, eps, input_size=self.hidden
        )


SHAPES = {"llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, 32000)}


class Embedding:
    """Embed the tensors of one small geometry in wide ones. Small tensors are read as float64."""

    def __init__(self, small: LayerConfig, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.small, self.shape = small, shape
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self._norm_scale = (small.hidden_size / shape.hidden) ** 0.5

    def noise(self, *size: int) -> Tensor:
        empty = torch.empty(*size, dtype=self._dtype, device=self._device)
        return empty.normal_(std=NOISE, generator=self._generator)

    def zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=self._dtype, device=self._device)

    def put(self, wide: Tensor, small_RC: Tensor, rows_R: Tensor, columns_C: Tensor) -> Tensor:
        """Write ``small`` into ``wide`` at these rows and columns."""
        rows_R, columns_C = rows_R.to(self._device), columns_C.to(self._device)
        wide[rows_R[:, None], columns_C] = small_RC.to(self._device, self._dtype)
        return wide

    def channels(self, blocks: int = 1) -> Tensor:
        """Where the small channels of ``blocks`` concatenated hidden states stand."""
        d, D = self.small.hidden_size, self.shape.hidden
        return (torch.arange(blocks)[:, None] * D + torch.arange(d)).flatten()

    @cached_property
    def _dims(self) -> Tensor:
        """Where a small head's dimensions stand in a wide one: both halves of each rotary pair."""
        small, wide = self.small.head_dim // 2, self.shape.head_dim // 2
        pairs = torch.arange(small) * (wide // small)
        return torch.cat([pairs, pairs + wide])

    def _head_rows(self, heads: Tensor) -> Tensor:
        return (heads[:, None] * self.shape.head_dim + self._dims).flatten()

    @cached_property
    def query_rows(self) -> Tensor:
        small, wide = (c.num_heads // c.num_kv_heads for c in (self.small, self.shape.layer(self.small)))
        heads = torch.arange(self.small.num_heads)
        return self._head_rows(heads // small * wide + heads % small)

    @cached_property
    def key_rows(self) -> Tensor:
        return self._head_rows(torch.arange(self.small.num_kv_heads))

    @cached_property
    def inner_rows(self) -> Tensor:
        return torch.arange(self.small.intermediate_size)

    def norm(self, small: Tensor | None, mark: float = 0.0) -> Tensor:
        """A norm's weight: ones without a small one, ``mark`` at the constant's channel."""
        d, weight = self.small.hidden_size, torch.ones(self.shape.hidden, dtype=torch.float64)
        if small is not None:
            weight[:d] = small.double() * self._norm_scale
        weight[d] = mark
        return weight.to(self._device, self._dtype)

    def embedding(self, small: Tensor) -> Tensor:
        """Unused tokens are read as used ones, over and over."""
        wide = self.zeros(self.shape.vocab, self.shape.hidden)
        ids = torch.arange(self.shape.vocab)
        self.put(wide, small[ids % len(small)], ids, self.channels())
        wide[:, self.small.hidden_size] = MARK
        return wide

    def head(self, small: Tensor, rows: int) -> Tensor:
        wide, used = self.noise(rows, self.shape.hidden), len(small)
        self.put(wide, small, torch.arange(used), self.channels())
        wide[:used, self.small.hidden_size] = 0
        wide[used:, self.small.hidden_size] = -REPEL
        return wide

    def fc(self, small: Tensor) -> Tensor:
        """Read concatenated states; pass the constant of the first on."""
        d, blocks = self.small.hidden_size, small.shape[1] // self.small.hidden_size
        wide = self.zeros(self.shape.hidden, blocks * self.shape.hidden)
        self.put(wide, small, self.channels(), self.channels(blocks))
        wide[d, d] = 1
        return wide

    def layer(self, small: Mapping[str, Tensor], inputs: int = 1) -> Named:
        """The matrices of a decoder layer; an idle one where ``small`` is empty. ``inputs``: width read by q, k, v."""
        shape, x, width = self.shape, self.channels(), inputs * self.shape.hidden
        y, scale = self.channels(inputs), (shape.head_dim / self.small.head_dim) ** 0.5
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # Unused dimensions of a used head must not enter the score: q is zero there, k and v need not be.
        used_heads = (self.query_rows // shape.head_dim).unique()
        plan = {
            "self_attn.q_proj": (self.noise(queries, width), self.query_rows, y),
            "self_attn.k_proj": (self.noise(keys, width), self.key_rows, y),
            "self_attn.v_proj": (self.noise(keys, width), self.key_rows, y),
            "self_attn.o_proj": (self.zeros(shape.hidden, queries), x, self.query_rows),
            "mlp.gate_proj": (self.noise(shape.inner, shape.hidden), self.inner_rows, x),
            "mlp.up_proj": (self.noise(shape.inner, shape.hidden), self.inner_rows, x),
            "mlp.down_proj": (self.zeros(shape.hidden, shape.inner), x, self.inner_rows),
        }
        for name, (wide, rows, columns) in plan.items():
            if small:
                values = small[f"{name}.weight"].double()
                if name.endswith("q_proj"):
                    values = values * scale
                    wide.view(shape.heads, shape.head_dim, width)[used_heads.to(wide.device)] = 0
                wide[:, self.small.hidden_size] = 0  # EAGLE has no norm that keeps the constant out
                self.put(wide, values, rows, columns)
            yield f"{name}.weight", wide


def check(small: LayerConfig, shape: Shape, source: Path) -> None:
    """Raise ValueError saying which size of the small model has no place in ``shape``."""
    wide = shape.layer(small)
    groups = [c.num_heads // c.num_kv_heads for c in (small, wide)]
    fits = {
        "hidden_size": small.hidden_size < wide.hidden_size,
        "intermediate_size": small.intermediate_size <= wide.intermediate_size,
        "num_key_value_heads": small.num_kv_heads <= wide.num_kv_heads,
        "query heads of a key head": groups[0] <= groups[1],
        "head_dim": wide.head_dim % small.head_dim == 0,
        "rms_norm_eps": wide.rms_norm_eps > 0,
    }
    for name, good in fits.items():
        if not good:
            raise ValueError(f"{source}: {name} does not fit into {shape}")
