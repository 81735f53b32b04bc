"""Training-time test against drafting one token at a time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from specserve_kernels import apply_rotary, normed_heads
from torch import Tensor

from specserve.layers.batch import GroupedQuery, TokenBatch
from specserve.models.checkpoint import load_target
from specserve.models.draft.head import LayerHead
from specserve.tools.train.attend import CausalAttend, Packing, TestTimeAttend, check_layers
from specserve.tools.train.eagle import make_eagle, make_eagle3
from specserve.tools.train.heads import HeadOptions
from specserve.tools.train.packed_attention import (
    _dense_backward,  # private: what a GPU runs in float64 and float32, which a CPU does not
    _dense_forward,  # private: as above
    causal_attention,
    causal_attention_backward,
    packed_attention,
)
from specserve.tools.train.trainer import Windows
from tests.reference import llama
from tests.reference.models import load_checkpoint, make_gemma3
from tests.train_models import tiny_batch, tiny_target

LEVELS = 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # rotary tables are float32, and positions differ by a constant


class CacheAttend:
    """Attention of inference: every new token attends to all tokens so far and itself."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, ask: GroupedQuery) -> Tensor:
        qkv_TND, num_kv_heads, rope = ask.qkv_TND, ask.num_kv_heads, ask.rope
        qkv_TND = normed_heads(qkv_TND, num_kv_heads, ask.norms)
        qk, values = qkv_TND[:, :-num_kv_heads], qkv_TND[:, -num_kv_heads:]
        qk = apply_rotary(qk, rope.table_P2R[rope.position_T])
        outs = []
        for query, key, value in zip(qk[:, :-num_kv_heads], qk[:, -num_kv_heads:], values, strict=True):
            self.keys.append(key)
            self.values.append(value)
            k, v = torch.stack(self.keys), torch.stack(self.values)
            group = query.shape[0] // num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            weights = torch.softmax(torch.einsum("nd,knd->nk", query, k) * query.shape[-1] ** -0.5, -1)
            outs.append(torch.einsum("nk,knd->nd", weights, v).flatten())
        return torch.stack(outs)


def drafted(draft: LayerHead, tokens: Tensor, features: Tensor, column: int) -> list[Tensor]:
    """States of the levels when drafting begins after the pairs (feature i, token i + 1) for i <= column."""
    attend = CacheAttend()
    positions = torch.arange(column + 1)
    state = draft(tokens[1 : column + 2], features[: column + 1], positions, attend)[-1:]
    states = [state]
    for level in range(1, LEVELS):
        token = tokens[column + 1 + level : column + 2 + level]
        state = draft(token, state, torch.tensor([column + level]), attend)
        states.append(state)
    return states


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_levels_equal_drafting_token_by_token(kind: str) -> None:
    target = tiny_target(torch.float64)
    ids = torch.arange(0, 40, 2)
    draft: LayerHead = (
        make_eagle(target, HeadOptions(), 64).double()
        if kind == "eagle"
        else make_eagle3(target, HeadOptions(taps=(0, 2, 4)), 64, ids).double()
    )
    batch = tiny_batch()
    windows, attend = Windows(batch), TestTimeAttend(batch.packing)
    hidden, tapped = target(
        TokenBatch(batch.tokens_T, batch.positions_T, CausalAttend(batch.packing), (0, 2, 4))
    )
    features = draft.fuse(hidden, tapped)
    states, unrolled = features, []
    for level in range(LEVELS):
        states = draft(windows.inputs(level), states, batch.positions_T + level, attend)
        unrolled.append(states)
    bounds = batch.packing.cu_seqlens.tolist()
    compared = 0
    for begin, end in pairwise(bounds):
        for column in range(end - begin - 1 - LEVELS):
            for level, state in enumerate(
                drafted(draft, batch.tokens_T[begin:end], features[begin:end], column)
            ):
                torch.testing.assert_close(unrolled[level][begin + column], state[0], **CLOSE)
                compared += 1
    assert compared > 60


def test_causal_attend_of_packed_documents_equals_each_alone() -> None:
    target, batch = tiny_target(torch.float64), tiny_batch()
    hidden, tapped = target(
        TokenBatch(batch.tokens_T, batch.positions_T, CausalAttend(batch.packing), (2, 4))
    )
    bounds = batch.packing.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        alone, taps = target(
            TokenBatch(batch.tokens_T[begin:end], torch.arange(end - begin), _layered(), (2, 4))
        )
        torch.testing.assert_close(hidden[begin:end], alone, **CLOSE)
        torch.testing.assert_close(tapped[0][begin:end], taps[0], **CLOSE)


def test_a_target_with_windows_and_its_own_scale(tmp_path: Path) -> None:
    """Rows may be as long as the window."""
    path = make_gemma3(tmp_path, sliding_window=12)
    model = load_target(path, torch.float64, torch.device("cpu"), 12)
    packing = Packing(torch.tensor([0, 12], dtype=torch.int32), 12, flash=False)
    states_TH, _ = model(TokenBatch(torch.arange(12), torch.arange(12), CausalAttend(packing)))
    expected = llama.forward(*load_checkpoint(path), range(12)).hidden
    torch.testing.assert_close(states_TH, expected, **CLOSE)
    check_layers(model.config.layers, 12)
    with pytest.raises(ValueError, match="--max-length: at most 12, the target's window, found 13"):
        check_layers(model.config.layers, 13)


def _layered() -> object:
    caches = [CacheAttend() for _ in range(4)]
    return lambda ask: caches[ask.layer](ask)


def test_packed_attention_gradients() -> None:
    torch.manual_seed(0)
    cu = torch.tensor([0, 3, 6, 8, 12], dtype=torch.int32)
    shapes = [(12, 4, 4), (12, 2, 4), (12, 2, 4), (12, 2, 2, 4), (12, 2, 2, 4)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *x: packed_attention(*x, cu, 6, False), inputs)


def test_dense_attention_is_that_of_each_document() -> None:
    torch.manual_seed(0)
    cu = torch.tensor([0, 3, 6, 8, 12], dtype=torch.int32)
    grad, q = torch.randn(2, 12, 4, 4)
    k, v = torch.randn(2, 12, 2, 4)
    forward = causal_attention(q, k, v, cu, 6, False)
    torch.testing.assert_close(_dense_forward(q, k, v, cu, 6), forward, **CLOSE)
    backward = causal_attention_backward(grad, q, k, v, *forward, cu, 6, False)
    torch.testing.assert_close(_dense_backward(grad, q, k, v, *forward, cu, 6), backward, **CLOSE)
