"""Attention over packed documents, with the extra same-column keys of training-time test.

Shapes: T tokens of all rows (rows of equal length, flattened), N query heads, K key heads, R query heads a
key head, D head size, J extra keys of a column, B rows, S row length, n documents.

A query at column t attends to the keys of its own document at columns <= t and to the J extra keys of column
t alone, under one softmax. The causal part is flash attention, on a GPU in 16 bits and on a CPU one document at
a time; else it is a dense softmax. The two parts are merged by their log-sum-exp. Flash attention's backward
needs only the merged output and log-sum-exp to give the causal part's exact gradients, so nothing is computed
twice.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def packed_attention(
    q_TND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    extra_k_TJKD: Tensor,
    extra_v_TJKD: Tensor,
    cu_seqlens: Tensor,  # int32 [n + 1]: where documents start, then T
    row_length: int,
    flash: bool,
) -> Tensor:
    """Return the output ``[T, N, D]`` in q's dtype. Differentiable in the first five arguments."""
    out: Tensor = _PackedAttention.apply(
        q_TND, k_TKD, v_TKD, extra_k_TJKD, extra_v_TJKD, cu_seqlens, row_length, flash
    )  # type: ignore[no-untyped-call]
    return out


class _PackedAttention(torch.autograd.Function):
    """The causal part is an opaque operator; the same-column part is left for ``torch.compile`` to fuse."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extra_k: Tensor,
        extra_v: Tensor,
        cu_seqlens: Tensor,
        row_length: int,
        flash: bool,
    ) -> Tensor:
        out: Tensor
        out, lse_NT = causal_attention(q, k, v, cu_seqlens, row_length, flash)
        if extra_k.shape[1]:
            out, lse_NT = _merge(q, out, lse_NT, extra_k, extra_v)
        ctx.save_for_backward(q, k, v, extra_k, extra_v, cu_seqlens, out, lse_NT)
        ctx.row_length, ctx.flash = row_length, flash
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, extra_k, extra_v, cu_seqlens, out, lse_NT = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = causal_attention_backward(
            grad, q, k, v, out, lse_NT, cu_seqlens, ctx.row_length, ctx.flash
        )
        if not extra_k.shape[1]:
            return dq, dk, dv, None, None, None, None, None
        dq_extra, dk_extra, dv_extra = _extra_backward(grad, q, extra_k, extra_v, out, lse_NT)
        dq = (dq + dq_extra).to(q.dtype)
        return dq, dk, dv, dk_extra.to(k.dtype), dv_extra.to(v.dtype), None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x_TNX: Tensor, num_kv_heads: int) -> Tensor:
    """Return ``[T, N, ...]`` as ``[T, 1, K, R, ...]`` in at least float32, to broadcast with extra keys ``[T, J, K, 1,
    D]``."""
    return torch.unflatten(_wide(x_TNX), 1, (num_kv_heads, -1)).unsqueeze(1)


def _extra_scores(q_TND: Tensor, extra_k_TJKD: Tensor) -> Tensor:
    """Return scaled scores ``[T, J, K, R]``, as products and sums rather than matrix products, because J is small."""
    q_T1KRD, k_TJK1D = _grouped(q_TND, extra_k_TJKD.shape[2]), _wide(extra_k_TJKD).unsqueeze(3)
    scores: Tensor = (q_T1KRD * k_TJK1D).sum(-1) * q_TND.shape[-1] ** -0.5
    return scores


def _merge(
    q_TND: Tensor, out_TND: Tensor, lse_NT: Tensor, extra_k_TJKD: Tensor, extra_v_TJKD: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the extra keys to a causal output. Returns output and log-sum-exp over both."""
    scores_TJKR = _extra_scores(q_TND, extra_k_TJKD)
    lse_TKR = torch.unflatten(lse_NT.T, 1, scores_TJKR.shape[2:])
    total_TKR = torch.logaddexp(lse_TKR, scores_TJKR.logsumexp(1))
    probs_TJKR1 = (scores_TJKR - total_TKR.unsqueeze(1)).exp().unsqueeze(-1)
    extra_TKRD = (probs_TJKR1 * _wide(extra_v_TJKD).unsqueeze(3)).sum(1)
    causal_TKRD = _wide(out_TND).view_as(extra_TKRD) * (lse_TKR - total_TKR).exp().unsqueeze(-1)
    out = (causal_TKRD + extra_TKRD).view_as(out_TND).to(q_TND.dtype)
    return out, total_TKR.flatten(1).T.contiguous()


def _extra_backward(
    grad_TND: Tensor, q_TND: Tensor, k_TJKD: Tensor, v_TJKD: Tensor, out_TND: Tensor, lse_NT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients from the extra keys: of q ``[T, N, D]`` and of their own k and v ``[T, J, K, D]``."""
    heads = k_TJKD.shape[2]
    grad, q, out = (_grouped(x, heads) for x in (grad_TND, q_TND, out_TND))
    k, v = _wide(k_TJKD).unsqueeze(3), _wide(v_TJKD).unsqueeze(3)
    scores_TJKR = _extra_scores(q_TND, k_TJKD)
    p_TJKR = (scores_TJKR - torch.unflatten(lse_NT.T, 1, scores_TJKR.shape[2:]).unsqueeze(1)).exp()
    ds_TJKR = p_TJKR * ((grad * v).sum(-1) - (grad * out).sum(-1)) * q_TND.shape[-1] ** -0.5
    ds_TJKR1 = ds_TJKR.unsqueeze(-1)
    dq = (ds_TJKR1 * k).sum(1).view_as(q_TND)
    return dq, (ds_TJKR1 * q).sum(3), (p_TJKR.unsqueeze(-1) * grad).sum(3)


@torch.library.custom_op("specserve_train::causal_attention", mutates_args=())
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, row_length: int, flash: bool
) -> tuple[Tensor, Tensor]:
    """Return causal attention within documents: output ``[T, N, D]``, log-sum-exp ``[N, T]`` in at least float32."""
    if q.is_cpu:
        return _cpu_forward(q, k, v, cu_seqlens)
    if not flash:
        return _dense_forward(q, k, v, cu_seqlens, row_length)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, row_length, row_length, 0.0, True, False
    )
    return out.contiguous(), lse.contiguous()


@causal_attention.register_fake
def _causal_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, row_length: int, flash: bool
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=wide)


@torch.library.custom_op("specserve_train::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    row_length: int,
    flash: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through the causal keys, given output and log-sum-exp over all keys."""
    if q.is_cpu:
        return _cpu_backward(grad, q, k, v, out, lse, cu_seqlens)
    if not flash:
        return _dense_backward(grad, q, k, v, out, lse, cu_seqlens, row_length)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout, which is off
    unused = torch.empty(0, device=q.device)
    cu = cu_seqlens
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu, cu, row_length, row_length, 0.0, True, seed, unused
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@causal_attention_backward.register_fake
def _causal_attention_backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    row_length: int,
    flash: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _cpu_forward(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    out_TND, lse_NT = _causal_attention_fake(q_TND, k_TKD, v_TKD, cu_seqlens, 0, False)
    for part in _documents(cu_seqlens):
        out_1NSD, lse_1NS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_one(x, part) for x in (q_TND, k_TKD, v_TKD)), 0.0, True
        )
        out_TND[part], lse_NT[:, part] = out_1NSD[0].transpose(0, 1), lse_1NS[0]
    return out_TND, lse_NT


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NT: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for part in _documents(cu_seqlens):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_one(x, part) for x in (grad, q, k, v, out)), lse_NT[None, :, part], 0.0, True
        )
        for whole, each in zip(found, grads, strict=True):
            whole[part] = each[0].transpose(0, 1)
    return found


def _documents(cu_seqlens: Tensor) -> list[slice]:
    return [slice(*ends) for ends in pairwise(cu_seqlens.tolist())]


def _one(x_TND: Tensor, part: slice) -> Tensor:
    """Return a document's ``[1, N, S, D]``."""
    return x_TND[part].transpose(0, 1)[None]


def _rows(x_TNX: Tensor, num_kv_heads: int, row_length: int) -> Tensor:
    """Return ``[T, N, D]`` as ``[B, K, R, S, D]`` in at least float32."""
    x_BSKRX = _wide(x_TNX).view(-1, row_length, num_kv_heads, x_TNX.shape[1] // num_kv_heads, x_TNX.shape[2])
    return x_BSKRX.permute(0, 2, 3, 1, 4)


def _flat(x_BKRSD: Tensor, like: Tensor) -> Tensor:
    return x_BKRSD.permute(0, 3, 1, 2, 4).reshape(like.shape).to(like.dtype)


def _dense_scores(q_BKRSD: Tensor, k_BK1SD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return masked, scaled scores ``[B, K, R, S, S]``."""
    rows, length = q_BKRSD.shape[0], q_BKRSD.shape[3]
    position = torch.arange(rows * length, device=cu_seqlens.device)
    document_BS = torch.bucketize(position, cu_seqlens.long(), right=True).view(rows, length)
    visible = (document_BS[:, :, None] == document_BS[:, None, :]).tril()
    scores = (q_BKRSD @ k_BK1SD.mT) * q_BKRSD.shape[-1] ** -0.5
    masked: Tensor = scores.masked_fill(~visible[:, None, None], float("-inf"))
    return masked


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, row_length: int) -> tuple[Tensor, Tensor]:
    q_BKRSD, k_BK1SD, v_BK1SD = (_rows(x, k.shape[1], row_length) for x in (q, k, v))
    scores = _dense_scores(q_BKRSD, k_BK1SD, cu)
    lse_BKRS = scores.logsumexp(-1)
    out = (scores - lse_BKRS.unsqueeze(-1)).exp() @ v_BK1SD
    return _flat(out, q), lse_BKRS.permute(1, 2, 0, 3).reshape(q.shape[1], q.shape[0])


def _dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NT: Tensor, cu: Tensor, row_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    g, q_, k_, v_, o = (_rows(x, k.shape[1], row_length) for x in (grad, q, k, v, out))
    lse_BKRS = lse_NT.view(*q_.shape[1:3], -1, row_length).permute(2, 0, 1, 3)
    p = (_dense_scores(q_, k_, cu) - lse_BKRS.unsqueeze(-1)).exp()
    ds = p * (g @ v_.mT - (g * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk, dv = (ds.mT @ q_).sum(2, keepdim=True), (p.mT @ g).sum(2, keepdim=True)
    return _flat(ds @ k_, q), _flat(dk, k), _flat(dv, v)
