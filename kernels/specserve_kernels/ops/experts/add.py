"""How outputs of a token's experts are added. Shapes as in ``experts``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_own(expert, E: tl.constexpr, OWN: tl.constexpr):
    """``expert``: counted from the first whose weights are here."""
    return expert < E if OWN == E else (expert >= 0) & (expert < OWN)


@triton.jit
def add_outputs(
    sums,
    kept,
    t,
    h,
    there_t,
    there_h,
    first_expert,
    E: tl.constexpr,
    OWN: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
):
    """Add to ``sums``, zeros, the outputs of tokens' experts that are here, in their order, and what is shared.
    Bypasses L1, which is not coherent with other programs' stores."""
    made_ptr, expert_ptr, share_ptr, shared_ptr, out_ptr = kept
    row, there = t.to(tl.int64)[:, None], there_t[:, None] & there_h[None, :]
    for k in tl.static_range(K):
        own = there
        if OWN < E:
            expert = tl.load(expert_ptr + row * K + k, mask=there_t[:, None], other=-1) - first_expert
            own = there & is_own(expert, E, OWN)
        made = tl.load(made_ptr + (row * K + k) * H + h[None, :], mask=own, other=0, cache_modifier=".cg")
        share = tl.load(share_ptr + row * K + k, mask=there_t[:, None], other=0)
        sums = tl.fma(made, tl.broadcast_to(share, made.shape), sums)
    if shared_ptr is not None:
        sums += tl.load(shared_ptr + row * H + h[None, :], mask=there, other=0).to(tl.float32)
    tl.store(out_ptr + row * H + h[None, :], sums.to(out_ptr.dtype.element_ty), mask=there)
