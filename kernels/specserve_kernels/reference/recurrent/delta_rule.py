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
    state = _state(kept, runs.rows_B, runs.length_B)
    out, made = _buffers(inputs.value_TVU)
    later = None
    for index in range(runs.longest):
        read, later_B = state, begin_T[_token(runs, index)] > begin_B
        if bool(later_B.any()):
            if later is None:
                at_BC = (begin_B[:, None] + torch.arange(block, device=begin_B.device)) % (2 * block)
                later = fold(state, *(table[runs.rows_B[:, None], at_BC] for table in kept[1:]))
            read = later.where(later_B[:, None, None, None], state)
        _run_token(inputs, kept, runs, index, read, out, made)
    made_TVU.copy_(made[:-1])
    return out[:-1]


def delta_prompts(inputs: DeltaInputs, kept: Lagged, runs: Runs, made_TVU: Tensor) -> Tensor:
    """Do the same for prompts' chunks, and advance the rows' states past them; the ring stays. Runs of one row are
    padding."""
    block, device = kept.key_REJD.shape[1] // 2, runs.rows_B.device
    state = _state(kept, runs.rows_B, runs.length_B)
    out, made = _buffers(inputs.value_TVU)
    entries = inputs.key_TJD, made, inputs.decay_TV
    for index in range(runs.longest + 1):
        end_B = runs.length_B + torch.minimum(runs.q_start.diff(), torch.tensor(index, device=device))
        full_B = (end_B % block == 0) & (end_B >= 2 * block) & (index == end_B - runs.length_B) & (index > 0)
        if bool(full_B.any()):
            at_BC = end_B[:, None] - 2 * block + torch.arange(block, device=device)
            found = (_at(runs, each, table, at_BC) for each, table in zip(entries, kept[1:], strict=True))
            state = fold(state, *found).where(full_B[:, None, None, None], state)
        if index < runs.longest:
            _run_token(inputs, kept, runs, index, state, out, made)
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
    added_BVDU = (key_BCVD[..., None] * value_BCVU.to(wide)[..., None, :]).sum(1)
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


def _at(runs: Runs, source_TX: Tensor, kept_REX: Tensor, position_BC: Tensor) -> Tensor:
    """Return what tokens at positions of each run have left, in it or before."""
    local_BC = position_BC - runs.length_B[:, None]
    own = source_TX[(runs.q_start[:-1, None] + local_BC).clamp(0, len(source_TX) - 1)]
    ring = kept_REX[runs.rows_B[:, None], position_BC % kept_REX.shape[1]]
    return own.where((local_BC >= 0).view(*local_BC.shape, *[1] * (own.dim() - 2)), ring)


def _run_token(
    inputs: DeltaInputs,
    kept: Lagged,
    runs: Runs,
    index: int,
    state_BVDU: Tensor,
    out_TVU: Tensor,
    made_TVU: Tensor,
) -> None:
    """Compute the token at ``index`` of each run that has one."""
    token_B, wide = _token(runs, index), inputs.decay_TV.dtype
    rows_B, position_B, back_BS = runs.rows_B, runs.position_T[token_B], runs.back_TE[token_B, 1:]
    entries, group = kept.key_REJD.shape[1], inputs.value_TVU.shape[1] // inputs.key_TJD.shape[1]
    before_BS = position_B[:, None] - torch.arange(1, entries, device=rows_B.device)
    since_BS = before_BS >= lag(position_B, entries // 2)[:, None]

    def entry(source_TX: Tensor, kept_REX: Tensor) -> Tensor:
        ring_BSX = kept_REX[rows_B[:, None], before_BS % entries]
        own_BSX = source_TX[back_BS.clamp(min=0)]
        return own_BSX.where((back_BS >= 0).view(*back_BS.shape, 1, 1), ring_BSX).to(wide)

    key_BSJD, value_BSVU = entry(inputs.key_TJD, kept.key_REJD), entry(made_TVU, kept.value_REVU)
    decay_BEV = inputs.decays_TVE[token_B].transpose(1, 2)
    whole_BV = decay_BEV[torch.arange(len(token_B)), position_B - lag(position_B, entries // 2)]

    def read(vector_BJD: Tensor) -> Tensor:
        """Return what state and entries return for a key or a query, ``[B, V, U]``."""
        dot_BSV = (key_BSJD * vector_BJD[:, None]).sum(-1).repeat_interleave(group, 2) * decay_BEV[:, :-1]
        from_entries = (dot_BSV[..., None] * value_BSVU).where(since_BS[..., None, None], 0).sum(1)
        vector_BVD = vector_BJD.repeat_interleave(group, 1)
        return whole_BV[..., None] * (state_BVDU.to(wide) * vector_BVD[..., None]).sum(-2) + from_entries

    query_BJD, key_BJD = inputs.query_TJD[token_B].to(wide), inputs.key_TJD[token_B].to(wide)
    beta_BV1, value_BVU = inputs.beta_TV[token_B].to(wide)[..., None], inputs.value_TVU[token_B].to(wide)
    new_BVU = (beta_BV1 * (value_BVU - read(key_BJD))).to(made_TVU.dtype)
    own_BV1 = (key_BJD * query_BJD).sum(-1).repeat_interleave(group, 1)[..., None]
    found_BVU = (read(query_BJD) + own_BV1 * new_BVU.to(wide)).to(out_TVU.dtype)
    written_B = token_B.where(index < runs.q_start.diff(), len(out_TVU) - 1)
    made_TVU[written_B], out_TVU[written_B] = new_BVU, found_BVU
