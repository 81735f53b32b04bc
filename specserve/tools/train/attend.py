"""Attention during training: dense over packed rows, rotary embedding included.

Shapes: T tokens (rows times row length), N heads (q, then k, then v), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from specserve_kernels import HeadNorms, apply_rotary, first_parts, normed_heads
from torch import Tensor
from torch.nn import functional as F

from specserve.layers.batch import GroupedQuery
from specserve.layers.config import LayerConfig
from specserve.layers.latent import Latent
from specserve.layers.rotary import Rope
from specserve.tools.train.packed_attention import packed_attention


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of documents in rows: ``cu_seqlens`` int32 ``[documents + 1]`` over the flattened tokens."""

    cu_seqlens: Tensor
    row_length: int
    flash: bool

    def documents(self, tokens: int) -> Tensor:
        """Return the document number of every token, int64 ``[tokens]``."""
        position = torch.arange(tokens, device=self.cu_seqlens.device)
        return torch.bucketize(position, self.cu_seqlens.long(), right=True)


def _rotate(
    qkv_TND: Tensor, norms: HeadNorms | None, num_kv_heads: int, rope: Rope
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normalized and rotated, and values, all in the dtype of ``qkv``."""
    qkv_TND = normed_heads(qkv_TND, num_kv_heads, norms)
    qk_TND, v_TKD = torch.split(qkv_TND, [qkv_TND.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    qk_TND = apply_rotary(qk_TND, rope.table_P2R[rope.position_T], rope.interleaved).to(qkv_TND.dtype)
    q_TND, k_TKD = torch.split(qk_TND, [qk_TND.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    return q_TND, k_TKD, v_TKD


def _grouped(ask: GroupedQuery | Latent) -> GroupedQuery:
    assert isinstance(ask, GroupedQuery)
    if ask.query_parts > 1:
        ask = replace(ask, qkv_TND=first_parts(ask.qkv_TND, ask.num_kv_heads, ask.query_parts), query_parts=1)
    return ask


def check_layers(layers: Sequence[LayerConfig], row_length: int) -> None:
    """Raise ValueError for a target's layers that ``CausalAttend`` does not run over rows of this length."""
    for layer in layers:
        refused = {
            "layers that keep a state": layer.state is not None,
            "latent attention": layer.latent is not None,
            "layers that share keys and values": layer.reads is not None,
            "attention with sinks or capped scores": layer.sinks or layer.softmax.cap,
        }
        if found := [words for words, is_so in refused.items() if is_so]:
            raise ValueError(f"--model-path: training does not support {found[0]}")
        if (window := layer.softmax.window) is not None and window < row_length:
            raise ValueError(f"--max-length: at most {window}, the target's window, found {row_length}")


class TestTimeAttend:
    """Training-time test of a one-layer draft: call i is drafting level i at every column at once.

    A query of level i at column t attends to level 0's keys at columns <= t of its document (the committed
    prefix) and to the keys of levels 1..i at column t (its own drafted ancestors and itself), as in drafting.
    """

    __test__ = False  # pytest must not collect it

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, ask: GroupedQuery | Latent) -> Tensor:
        ask = _grouped(ask)
        q, k, v = _rotate(ask.qkv_TND, ask.norms, ask.num_kv_heads, ask.rope)
        self.keys.append(k)
        self.values.append(v)
        extra_k, extra_v = (_columns(cache) for cache in (self.keys, self.values))
        k, v, packing = self.keys[0], self.values[0], self.packing
        rows = packing.cu_seqlens, packing.row_length
        return packed_attention(q, k, v, extra_k, extra_v, *rows, packing.flash).flatten(1)


class CausalAttend:
    """Let every token attend to its own document up to itself, as a target does, and a draft at its first level.
    ``check_layers`` says of which targets."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def __call__(self, ask: GroupedQuery | Latent) -> Tensor:
        ask = _grouped(ask)
        scale, size = ask.softmax.scale, ask.qkv_TND.shape[-1]
        if scale is not None:
            qkv_TND = normed_heads(ask.qkv_TND, ask.num_kv_heads, ask.norms).clone()
            qkv_TND[:, : -2 * ask.num_kv_heads] *= scale * size**0.5
            ask = replace(ask, qkv_TND=qkv_TND, norms=None)
        return TestTimeAttend(self.packing)(ask)


class BlockAttend:
    """Attention of several blocks per row. Each token attends to its own block, and to the tokens before the block's
    first token (the anchor) in its document, through the keys and values ``past``.

    Shapes: B rows, S row length, A anchors a row, K tokens of a block, Q = A * K.
    """

    def __init__(
        self,
        packing: Packing,
        anchor_BA: Tensor,
        size: int,
        past: Sequence[tuple[Tensor, HeadNorms | None]],
        rope: Rope,
    ) -> None:
        """``past``: keys, then values, ``[T, 2 * kv heads, D]`` of all rows' tokens, neither normalized nor rotated,
        and their norms."""
        self._past = [_rotate(kv_TND, norms, kv_TND.shape[1] // 2, rope)[1:] for kv_TND, norms in past]
        length, (rows, anchors) = packing.row_length, anchor_BA.shape
        column_S = torch.arange(length, device=anchor_BA.device)
        document_BS = packing.documents(rows * length).view(rows, length)
        document_BA1 = document_BS.gather(1, anchor_BA)[..., None]
        before_BAS = (document_BA1 == document_BS[:, None]) & (column_S < anchor_BA[..., None])
        block_Q = torch.arange(anchors * size, device=anchor_BA.device) // size
        own_BQQ = (block_Q[:, None] == block_Q).expand(rows, -1, -1)
        self._seen_BQX = torch.cat([before_BAS.repeat_interleave(size, 1), own_BQQ], 2)

    def __call__(self, ask: GroupedQuery | Latent) -> Tensor:
        ask = _grouped(ask)
        q_TND, *own = _rotate(ask.qkv_TND, ask.norms, ask.num_kv_heads, ask.rope)
        rows = len(self._seen_BQX)

        def laid(x_TND: Tensor) -> Tensor:
            return x_TND.reshape(rows, -1, *x_TND.shape[1:]).transpose(1, 2)

        k, v = (
            torch.cat([laid(past), laid(x)], 2) for past, x in zip(self._past[ask.layer], own, strict=True)
        )
        seen = self._seen_BQX[:, None]
        out = F.scaled_dot_product_attention(laid(q_TND), k, v, attn_mask=seen, enable_gqa=True)
        found: Tensor = out.transpose(1, 2).flatten(0, 1).flatten(1)
        return found


def _columns(cache: list[Tensor]) -> Tensor:
    """Return the entries of levels 1 and deeper as ``[T, levels, K, D]``."""
    if len(cache) == 1:
        return cache[0].new_empty((cache[0].shape[0], 0, *cache[0].shape[1:]))
    return torch.stack(cache[1:], dim=1)
