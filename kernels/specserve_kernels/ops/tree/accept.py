"""Accept on a GPU: one program walks one slot's tree. Shapes as in ``types``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops.device import next_power_of_2
from specserve_kernels.ops.pdl import overlap, take_turn
from specserve_kernels.types import MAX_NODES, Accepted, Slots, Tree


def accept_path(tree: Tree, chosen_T: Tensor, slots: Slots) -> Accepted:
    length_B, columns = slots.length_B, tree.levels + 1
    batch = len(length_B)
    fields = length_B.new_empty(6, batch, columns).unbind()
    path, place, source_place, next_token, next_place, next_position = fields
    count, packed = length_B.new_empty(batch), length_B.new_empty(batch, columns + 3)
    _accept_kernel[(batch,)](
        tree.token_T,
        chosen_T,
        tree.parent_T,
        tree.depth_T,
        tree.mask_T,
        tree.q_start,
        length_B,
        path,
        count,
        packed,
        place,
        source_place,
        next_token,
        next_place,
        next_position,
        columns,
        slots.capacity,
        NODES=MAX_NODES,
        SP=max(next_power_of_2(columns), 8),
        num_warps=2,
        **overlap(),
    )
    return Accepted(
        path_BS=path,
        count_B=count,
        packed_BX=packed,
        place_BS=place,
        source_place_BS=source_place,
        next_token_BS=next_token,
        next_place_BS=next_place,
        next_position_BS=next_position,
    )


@triton.jit(do_not_specialize=range(17))
def _accept_kernel(
    token_ptr,  # [T], as all up to mask_ptr
    chosen_ptr,
    parent_ptr,
    depth_ptr,
    mask_ptr,
    q_start_ptr,  # [B + 1]
    length_ptr,  # [B]
    path_ptr,  # out [B, S + 1]
    count_ptr,  # out [B]
    packed_ptr,  # out [B, S + 4]
    place_ptr,  # out [B, S + 1], as all below
    source_place_ptr,
    next_token_ptr,
    next_place_ptr,
    next_position_ptr,
    columns,  # S + 1
    capacity,  # places of a slot
    NODES: tl.constexpr,
    SP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(q_start_ptr + b)
    nodes = tl.load(q_start_ptr + b + 1) - first
    length = tl.load(length_ptr + b)
    local = tl.arange(0, NODES)
    inside = local < nodes
    t = first + local
    token = tl.load(token_ptr + t, mask=inside, other=-1)
    parent = tl.load(parent_ptr + t, mask=inside, other=0)
    depth = tl.load(depth_ptr + t, mask=inside, other=-1)
    mask = tl.load(mask_ptr + t, mask=inside, other=0)
    wanted = tl.load(chosen_ptr + parent, mask=inside, other=-2)
    agrees = ((token == wanted) | (local == 0)) & inside
    # All bits differ, so their sum, with bit 63 wrapping, is their union.
    bits = tl.sum(agrees.to(tl.int64) << local.to(tl.int64), axis=0)
    accepted = inside & ((mask & bits) == mask)
    count = tl.sum(accepted.to(tl.int32), axis=0)
    elder = (parent[:, None] == parent[None, :]) & (local[None, :] < local[:, None]) & (local > 0)[None, :]
    is_first = inside & ((local == 0) | (tl.sum(elder.to(tl.int32), axis=1) == 0))
    first_bits = tl.sum(is_first.to(tl.int64) << local.to(tl.int64), axis=0)
    chain = inside & ((mask & first_bits) == mask)
    followed = chain & accepted
    # At most one accepted node for each depth: siblings carry different tokens.
    s = tl.arange(0, SP)
    hit = accepted[:, None] & (depth[:, None] == s[None, :])
    way = tl.sum(tl.where(hit, local[:, None], 0), axis=0)
    live = s < count
    path = tl.where(live, first + way, 0)
    chosen = tl.load(chosen_ptr + path, mask=live, other=-1)
    position = length + s
    place = b * capacity + position
    column = s < columns
    out = b * columns + s
    tl.store(path_ptr + out, path, mask=column)
    tl.store(count_ptr + b, count.to(tl.int64))
    packed = packed_ptr + b * (columns + 3)
    tl.store(packed + s, chosen, mask=column)
    tl.store(packed + columns, nodes - 1)
    tl.store(packed + columns + 1, tl.sum(chain.to(tl.int64), axis=0) - 1)
    tl.store(packed + columns + 2, tl.sum(followed.to(tl.int64), axis=0) - 1)
    tl.store(place_ptr + out, tl.where(live, place, -1), mask=column)
    tl.store(source_place_ptr + out, tl.where(live, b * capacity + length + way, -1), mask=column)
    tl.store(next_token_ptr + out, tl.where(live, chosen, 0), mask=column)
    tl.store(next_place_ptr + out, tl.where(live, place + 1, -1), mask=column)
    tl.store(next_position_ptr + out, position + 1, mask=column)
