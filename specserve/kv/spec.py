"""The layout of a layer's KV cache: bytes of a token, tensor, rows."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from specserve_kernels import KVScales
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadKV:
    """Keys and values of every KV head (multi-head, grouped-query and multi-query attention):
    ``[layers, pages, (k, v), page size, kv heads, head size]``. Equal specs of neighbouring layers share a tensor.
    ``scales`` None: the cache is stored in the dtype of computation. ``window``: the tokens that attention sees, the
    own one included; None: all."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scales: KVScales | None = field(default=None, compare=False)
    window: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        window = f" with a window of {self.window} tokens" if self.window else ""
        return f"{self.num_kv_heads} KV heads of size {self.head_dim}{window}"

    @property
    def token_bytes(self) -> int:
        """Memory of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def in_fp8(self, scales: KVScales) -> HeadKV:
        """Return the same spec, stored as float8_e4m3fn."""
        return replace(self, dtype=torch.float8_e4m3fn, scales=scales)

    def view(self, bytes_LPX: Tensor, page_size: int) -> Tensor:
        """View each layer's bytes of each page as ``[layers, pages, parts, page size, ...]``: each part of a page holds
        one row a token."""
        own_LPX = bytes_LPX[..., : self.token_bytes * page_size].view(self.dtype)
        return own_LPX.view(*own_LPX.shape[:2], 2, page_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentKV:
    """One row for all heads (latent attention): a latent, from which keys and values are made, and a rotated key:
    ``[layers, pages, 1, page size, rank + rope size]``."""

    rank: int
    rope_size: int
    dtype: torch.dtype
    scales: KVScales | None = field(default=None, compare=False)
    window: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"latents of {self.rank} and rotated keys of {self.rope_size}"

    @property
    def token_bytes(self) -> int:
        return (self.rank + self.rope_size) * self.dtype.itemsize

    def in_fp8(self, scales: KVScales) -> LatentKV:
        """Keys and values are the same numbers: they have the keys' scale."""
        return replace(self, dtype=torch.float8_e4m3fn, scales=KVScales(scales.key, scales.key))

    def view(self, bytes_LPX: Tensor, page_size: int) -> Tensor:
        own_LPX = bytes_LPX[..., : self.token_bytes * page_size].view(self.dtype)
        return own_LPX.view(*own_LPX.shape[:2], 1, page_size, self.rank + self.rope_size)


KVSpec = HeadKV | LatentKV
BLOCK = 32
"""Tokens by which a state lags at least, and most nodes on a path of a tree."""
MOST_LEVELS = BLOCK - 1


@dataclass(frozen=True, slots=True)
class DeltaState:
    """What a gated delta net keeps of a request, however long it is: a state for each value head, and of the last
    tokens entries and the inputs of a convolution over ``width`` tokens. Each key head serves neighbouring value
    heads."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of the convolution: queries, keys and values."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU they take no memory, and no time, before they are first touched; ``torch.zeros`` writes to
    all of them."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
