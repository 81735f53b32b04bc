"""What each token gives to the delta rule, and what its row keeps of it.

Shapes as in ``delta_rule``; C channels of a convolution over K tokens: first queries', then keys', then values'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.reference.recurrent.delta_rule import DeltaInputs, Left, Runs

NEVER = 2**62  # tokens that no text has
EPS = 1e-6  # added to the squared length of queries and keys


def trace_back(parent_T: Tensor | None, local_T: Tensor, levels: int, span: int) -> Tensor:
    """Return the packed index of the token so many before each on its path, itself at 0, ``[T, span]``; -1 before the
    pass's tokens. ``parent_T`` None: every run is a chain. ``levels``: the largest depth of a node."""
    node_T = torch.arange(len(local_T), device=local_T.device)
    if parent_T is None:
        distance_S = torch.arange(span, device=local_T.device)
        return (node_T[:, None] - distance_S).where(distance_S <= local_T[:, None], -1)
    columns = [node_T]
    for _ in range(min(levels, span - 1)):
        inner_T = (columns[-1] >= 0) & (local_T[columns[-1]] > 0)
        columns.append(parent_T[columns[-1]].where(inner_T, -1))
    missing = node_T.new_full((len(local_T), span - len(columns)), -1)
    return torch.cat([torch.stack(columns, 1), missing], 1)


def place(position: Tensor, width: int, page: int) -> Tensor:
    """Return where a row keeps the convolution's input at a position: the last ``width`` are there, and as many before
    the last page's end, of which every second page has its own. ``page``: more than ``width`` tokens."""
    return position // page % 2 * width + position % width


def delta_inputs(
    x_TC: Tensor,
    weight_CK: Tensor,
    b_TV: Tensor,
    a_TV: Tensor,
    rate_V: Tensor,
    bias_V: Tensor,
    kept_RWC: Tensor,
    kept_REV: Tensor,
    runs: Runs,
    left: Left,
) -> DeltaInputs:
    """Return what each token gives, of its input ``x_TC``, the convolution's weights, and ``b_TV``, ``a_TV`` and its
    heads' weights; write to ``left`` what its row keeps, but values.

    Queries are ``1 / sqrt(D)`` long, keys 1. With values they are the SiLU of the sum of each token's channels and
    those of the K - 1 tokens before it on its path, weighed by tap and channel, rounded before it is normalized.
    ``kept_RWC``: of rows' last tokens, by ``place``. The factor of a correction is
    ``sigmoid(b)``, rounded, and ``g = -exp(rate) * softplus(a + bias)``."""
    wide, width = torch.promote_types(x_TC.dtype, torch.float32), weight_CK.shape[1] - 1
    weight_KC = weight_CK.to(wide).T
    total_TC = weight_KC[-1] * x_TC.to(wide)
    for distance in range(1, width + 1):
        back_T, before_T = runs.back_TE[:, distance], runs.position_T - distance
        own_TC, ring_TC = x_TC[back_T.clamp(min=0)], kept_RWC[runs.rows_T, place(before_T, width, runs.page)]
        tap_TC = own_TC.where((back_T >= 0)[:, None], ring_TC).where((before_T >= 0)[:, None], 0)
        total_TC = total_TC + weight_KC[-1 - distance] * tap_TC.to(wide)
    _, heads, size = left.key_TJD.shape
    keys, mixed_TC = heads * size, (total_TC * _sigmoid(total_TC)).to(x_TC.dtype)
    query_TJD, key_TJD = (each.unflatten(1, (heads, size)) for each in mixed_TC[:, : 2 * keys].chunk(2, 1))
    left.key_TJD.copy_(_normed(key_TJD.to(wide), 1))
    left.input_TC.copy_(x_TC)
    query_TJD = _normed(query_TJD.to(wide), size**-0.5).to(x_TC.dtype)
    value_TVU = mixed_TC[:, 2 * keys :].reshape_as(left.value_TVU)
    beta_TV = _sigmoid(b_TV.to(wide)).to(b_TV.dtype).to(wide)
    decays_TVE = _decays(a_TV, rate_V, bias_V, kept_REV, runs, left.decay_TV)
    return DeltaInputs(query_TJD, left.key_TJD, value_TVU, beta_TV, left.decay_TV, decays_TVE)


def _normed(x_TJD: Tensor, length: float) -> Tensor:
    return x_TJD / (x_TJD.square().sum(-1, keepdim=True) + EPS).sqrt() * length


def _sigmoid(x: Tensor) -> Tensor:
    """Return it with the same bits wherever a number lies, unlike ``torch.sigmoid`` on a CPU."""
    return 1 / (1 + (-x).exp())


def _decays(
    a_TV: Tensor, rate_V: Tensor, bias_V: Tensor, kept_REV: Tensor, runs: Runs, decay_TV: Tensor
) -> Tensor:
    """Write each token's g. Return ``exp`` of its and those of the tokens before it, added one by one."""
    back_TE, entries = runs.back_TE, kept_REV.shape[1]
    sum_TV = a_TV.to(rate_V.dtype) + bias_V
    softplus_TV = sum_TV.clamp(min=0) + (-sum_TV.abs()).exp().log1p()
    decay_TV.copy_(-rate_V.exp() * softplus_TV)
    before_TE = runs.position_T[:, None] - torch.arange(entries, device=back_TE.device)
    kept_TEV = kept_REV[runs.rows_T[:, None], before_TE % entries]
    decay_TEV = decay_TV[back_TE.clamp(min=0)].where((back_TE >= 0)[..., None], kept_TEV)
    decays_TEV = decay_TEV.where((before_TE >= 0)[..., None], 0).cumsum(1).exp()
    return decays_TEV.transpose(1, 2).contiguous()


def keep_last(
    tables: tuple[Tensor, ...],
    left: Left,
    page: int,
    index_N: Tensor,
    rows_N: Tensor,
    position_N: Tensor,
    end_N: Tensor,
) -> None:
    """Write what tokens left, at ``index_N`` of each, to their rows' rings ``[L, R, E, ...]``, in all layers, and to
    their places of inputs. ``position_N`` -1: a rejected token. ``end_N``: tokens that its row then has, of which a
    ring keeps as many as it has room for. The last row may be overwritten."""
    *rings, inputs_LRWC = tables
    entries, width, dummy = rings[0].shape[2], inputs_LRWC.shape[2] // 2, inputs_LRWC.shape[1] - 1
    page_N, live_N = end_N // page * page, position_N >= 0
    ends_page_N = (position_N >= page_N - width) & (position_N < page_N)
    written_N = rows_N.where(live_N & (position_N >= end_N - entries), dummy)
    for table_LREX, source_LTX in zip(rings, left, strict=False):
        table_LREX[:, written_N, position_N % entries] = source_LTX[:, index_N]
    written_N = rows_N.where(live_N & ((position_N >= end_N - width) | ends_page_N), dummy)
    inputs_LRWC[:, written_N, place(position_N, width, page)] = left.input_TC[:, index_N]


def cut_paths(
    token_T: Tensor, path_BS: Tensor, count_B: Tensor, rows_B: Tensor, length_B: Tensor, ends_RX: Tensor
) -> tuple[Tensor, ...]:
    """Cut accepted paths of ``count_B`` nodes where their rows' texts end, after which a row keeps nothing: its state
    stays that of the text, whatever is accepted later. ``ends_RX``: of each row, how many tokens are kept at most,
    lowered here by a token that ends it, then those tokens, -1: none. Return how many nodes are kept of each path, and
    of each node, flat, what ``keep_last`` takes: row, position and end."""
    column_S = torch.arange(path_BS.shape[1], device=path_BS.device)
    position_BS = length_B[:, None] + column_S
    ends_BS = (token_T[path_BS][..., None] == ends_RX[rows_B, None, 1:]).any(2)
    ends_BS &= column_S < count_B[:, None]
    most_B = torch.minimum(ends_RX[rows_B, 0], position_BS.where(ends_BS, NEVER).amin(1))
    ends_RX[rows_B, 0] = most_B
    end_B = torch.minimum(length_B + count_B, most_B)
    kept_B = (end_B - length_B).clamp(min=0)
    position_BS = position_BS.where(column_S < kept_B[:, None], -1)
    rows_BS, end_BS = (each_B[:, None].expand_as(position_BS) for each_B in (rows_B, end_B))
    return kept_B, *(each.reshape(-1) for each in (rows_BS, position_BS, end_BS))
