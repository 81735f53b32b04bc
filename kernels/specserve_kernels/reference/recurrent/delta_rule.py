"""The gated delta rule in lagged blocks: a token decays the state, corrects what it returns for the token's key, and
reads it with the token's query.

    S = exp(g) * S;   u = beta * (v - S^T k);   S = S + k u^T;   out = S^T q

A row's stored state lags. A token at position p reads the state after ``lag(p)`` tokens, a multiple of C, and the
*entries* (k, u, g) of the C to 2C - 1 tokens since then, those of committed ones from a ring of E = 2C, others from its
ancestors:

    seen = w_m * S^T k + sum_i w_i * (k_i . k) * u_i;   u = beta * (v - seen);   out likewise, with q and its own entry

where w_i is the decay from after entry i up to the token. So only committed tokens are ever folded into a state, no
path of a tree needs its own, and a token's bits depend on neither drafts nor chunks. Products and sums have fixed
orders; k and u are rounded once, when made; decays are summed backwards from the token, because a difference of prefix
sums cancels and of two infinite ones is NaN. At least C tokens must hold a tree's deepest path, its root included.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), equation 10.

Shapes: T packed tokens or nodes, B runs, R rows of the state, the last for padding, L layers, E entries of a ring, C of
them in a block, J key heads, V value heads (a multiple), D and U channels of a key and of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lagged(NamedTuple):
    """What a layer keeps of each row: the state after ``lag(length)`` tokens, which counts as 0 if these are none, and
    the entries since then, that of position p at p % E. ``decay``: float32 or wider. Or all layers' before R."""

    state_RVDU: Tensor
    key_REJD: Tensor
    value_REVU: Tensor
    decay_REV: Tensor


class Runs(NamedTuple):
    """The tokens of a pass, packed by run: prompts' chunks, or trees. ``back_TE``: as ``trace_back`` returns it.
    ``longest``: an upper bound of a run's tokens, known to the host."""

    rows_B: Tensor  # int64
    length_B: Tensor  # tokens before each run
    q_start: Tensor  # [B + 1]
    rows_T: Tensor
    position_T: Tensor
    back_TE: Tensor
    longest: int
    page: int  # as in ``place``


class Left(NamedTuple):
    """What a pass leaves of each token for its row's rings: the entry, and the input of the convolution. Contiguous;
    or all layers' before T."""

    key_TJD: Tensor
    value_TVU: Tensor
    decay_TV: Tensor
    input_TC: Tensor


class DeltaInputs(NamedTuple):
    """Of each token: query and key, normalized, in the dtype of entries; value; the factor of its correction; g; and
    ``exp`` of its g and those of the tokens before it on its path, by how many tokens before."""

    query_TJD: Tensor
    key_TJD: Tensor
    value_TVU: Tensor
    beta_TV: Tensor
    decay_TV: Tensor
    decays_TVE: Tensor


def lag(position: Tensor, block: int) -> Tensor:
    """Return how many tokens the state has seen that a token at a position reads."""
    return (position // block - 1).clamp(min=0) * block


def delta_nodes(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    """Return the outputs ``[T, V, U]`` of trees' nodes, parents before children, and write corrected values to
    ``made_TVU``. Changes nothing else. Outputs of unused nodes, after the last run, are 0."""
    block = kept.key_REJD.shape[1] // 2
    begin_B, begin_T = lag(runs.length_B, block), lag(runs.position_T, block)
    state, rings = _state(kept, runs.rows_B, runs.length_B), _rings(kept, runs)
    out, made = _buffers(inputs.value_TVU)
    later = None
    for index in range(runs.longest):
        read, later_B = state, begin_T[_token(runs, index)] > begin_B
        if bool(later_B.any()):
            later = fold(state, *_block(rings, begin_B)) if later is None else later
            read = later.where(later_B[:, None, None, None], state)
        _run_token(inputs, rings, runs, index, read, out, made, path=index > 0)
    made_TVU.copy_(made[:-1])
    return out[:-1]


def delta_prompts(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    """Do the same for prompts' chunks, and advance the rows' states past them; the ring stays. Runs of one row are
    padding."""
    entries, row_B = kept.key_REJD.shape[1], torch.arange(len(runs.rows_B), device=runs.rows_B.device)
    state, rings = _state(kept, runs.rows_B, runs.length_B), _rings(kept, runs)
    out, made = _buffers(inputs.value_TVU)
    for index in range(runs.longest + 1):
        end_B, there_B = runs.length_B + index, index <= runs.q_start.diff()
        full_B = there_B & (end_B % (entries // 2) == 0) & (end_B >= entries)
        if index and bool(full_B.any()):
            state = fold(state, *_block(rings, end_B)).where(full_B[:, None, None, None], state)
        if index < runs.longest:
            _run_token(inputs, rings, runs, index, state, out, made, path=False)
            token_B = _token(runs, index)  # of a run that has ended any: nothing reads its ring
            for ring, source_TX in zip(rings, (inputs.key_TJD, made, inputs.decay_TV), strict=True):
                ring[row_B, :, end_B % entries] = source_TX[token_B].to(ring.dtype)
    kept.state_RVDU[runs.rows_B] = state
    made_TVU.copy_(made[:-1])
    return out[:-1]


def fold_states(kept: Lagged, rows_B: Tensor, length_B: Tensor, count_B: Tensor) -> None:
    """Advance the states of all layers, before the entries of ``count_B`` more tokens are written."""
    block = kept.key_REJD.shape[2] // 2
    begin_B = lag(length_B, block)
    full_B = lag(length_B + count_B, block) > begin_B
    if not bool(full_B.any()):
        return
    at_BC = (begin_B[:, None] + torch.arange(block, device=rows_B.device)) % (2 * block)
    for layer in zip(*kept, strict=True):
        one = Lagged(*layer)
        state = _state(one, rows_B, length_B)
        later = fold(state, *(table[rows_B[:, None], at_BC] for table in one[1:]))
        one.state_RVDU[rows_B] = later.where(full_B[:, None, None, None], one.state_RVDU[rows_B])


def fold(state_BVDU: Tensor, key_BCJD: Tensor, value_BCVU: Tensor, decay_BCV: Tensor) -> Tensor:
    """Return the state a block later, rounded as it is stored."""
    wide, group = decay_BCV.dtype, value_BCVU.shape[2] // key_BCJD.shape[2]
    run_BCV = decay_BCV.flip(1).cumsum(1)
    weight_BCV = torch.cat([torch.zeros_like(run_BCV[:, :1]), run_BCV[:, :-1]], 1).flip(1).exp()
    key_BCVD = key_BCJD.to(wide).repeat_interleave(group, 2) * weight_BCV[..., None]
    added_BVDU = key_BCVD.permute(0, 2, 3, 1) @ value_BCVU.to(wide).transpose(1, 2)
    whole_BV11 = run_BCV[:, -1].exp()[..., None, None]
    return (whole_BV11 * state_BVDU.to(wide) + added_BVDU).to(state_BVDU.dtype)


def _state(kept: Lagged, rows_B: Tensor, length_B: Tensor) -> Tensor:
    seen_B = lag(length_B, kept.key_REJD.shape[1] // 2) > 0
    return kept.state_RVDU[rows_B].where(seen_B[:, None, None, None], 0)


def _buffers(value_TVU: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for outputs and corrected values, and last for those of no token."""
    zeros = value_TVU.new_zeros(2, len(value_TVU) + 1, *value_TVU.shape[1:])
    return zeros[0], zeros[1]


def _token(runs: Runs, index: int) -> Tensor:
    """Return the token at ``index`` of each run, or some token if it has fewer."""
    return (runs.q_start[:-1] + index).clamp(max=len(runs.position_T) - 1)


def _rings(kept: Lagged, runs: Runs) -> tuple[Tensor, ...]:
    """Return the entries before each run, as wide numbers, 0 where nothing reads them: ``[B, J, E, D]``,
    ``[B, V, E, U]`` and ``[B, V, E]``."""
    last_B1, entries, wide = runs.length_B[:, None] - 1, kept.key_REJD.shape[1], kept.decay_REV.dtype
    back_BE = (last_B1 - torch.arange(entries, device=last_B1.device)) % entries
    there_BE = last_B1 - back_BE >= lag(last_B1 + 1, entries // 2)
    found = (
        each[runs.rows_B].where(there_BE.view(*there_BE.shape, *[1] * (each.dim() - 2)), 0)
        for each in kept[1:]
    )
    return tuple(each.to(wide).transpose(1, 2).contiguous() for each in found)


def _block(rings: tuple[Tensor, ...], begin_B: Tensor) -> list[Tensor]:
    """Return the entries of a block from a position on, or so many tokens before it as rings have."""
    entries = rings[0].shape[2]
    row_B1 = torch.arange(len(begin_B), device=begin_B.device)[:, None]
    at_BC = (begin_B[:, None] + torch.arange(entries // 2, device=begin_B.device)) % entries
    return [ring[row_B1, :, at_BC] for ring in rings]


def _run_token(
    inputs: DeltaInputs,
    rings: tuple[Tensor, ...],
    runs: Runs,
    index: int,
    state_BVDU: Tensor,
    out_TVU: Tensor,
    made_TVU: Tensor,
    path: bool,
) -> None:
    """Compute the token at ``index`` of each run that has one. ``path``: it reads its ancestors, which are not in the
    rings."""
    token_B, (key_BJED, value_BVEU, _) = _token(runs, index), rings
    entries, wide, group = key_BJED.shape[2], key_BJED.dtype, value_BVEU.shape[1] // key_BJED.shape[1]
    position_B, decay_BVE = runs.position_T[token_B], inputs.decays_TVE[token_B]
    since_B = position_B - lag(position_B, entries // 2)
    before_BE = (position_B[:, None] - 1 - torch.arange(entries, device=token_B.device)) % entries  # and one
    if path:
        back_BE = runs.back_TE[token_B].gather(1, (before_BE + 1) % entries)
        own_BE11 = (back_BE >= 0)[..., None, None]
        key_BJED, value_BVEU = (
            source_TX[back_BE.clamp(min=0)].to(wide).where(own_BE11, ring.transpose(1, 2)).transpose(1, 2)
            for source_TX, ring in ((inputs.key_TJD, key_BJED), (made_TVU, value_BVEU))
        )
    weight_BVE = decay_BVE.gather(2, before_BE[:, None].expand_as(decay_BVE))
    weight_BVE = weight_BVE.where((before_BE < since_B[:, None])[:, None], 0)
    whole_BV11 = decay_BVE[torch.arange(len(token_B)), :, since_B][..., None, None]
    # Of the key, what is corrected; of the query, the output but for its own entry. Sums have one order, as factors are
    # contiguous.
    x_BJ2D = torch.stack([inputs.key_TJD[token_B], inputs.query_TJD[token_B]], 2).to(wide)
    pair_BJ2E, x_BV2D = x_BJ2D @ key_BJED.contiguous().mT, x_BJ2D.repeat_interleave(group, 1)
    read_BV2U = (pair_BJ2E.repeat_interleave(group, 1) * weight_BVE[:, :, None]) @ value_BVEU.contiguous()
    read_BV2U += whole_BV11 * (x_BV2D @ state_BVDU.to(wide))
    beta_BV1, value_BVU = inputs.beta_TV[token_B].to(wide)[..., None], inputs.value_TVU[token_B].to(wide)
    new_BVU = (beta_BV1 * (value_BVU - read_BV2U[:, :, 0])).to(made_TVU.dtype)
    own_BV1 = x_BV2D.prod(2).sum(-1, keepdim=True)
    found_BVU = (read_BV2U[:, :, 1] + own_BV1 * new_BVU.to(wide)).to(out_TVU.dtype)
    written_B = token_B.where(index < runs.q_start.diff(), len(out_TVU) - 1)
    made_TVU[written_B], out_TVU[written_B] = new_BVU, found_BVU
