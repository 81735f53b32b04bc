"""The gated delta net: a layer that keeps a state instead of keys and values.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).

Shapes: T tokens, H hidden size, C channels of the convolution, K tokens that it reads, V value heads of U channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from specserve_kernels import Rounded, gate_heads, given, linear_ahead
from torch import Tensor, nn

from specserve.kv.spec import DeltaState
from specserve.layers.batch import DeltaRule, LayerCall, Recurs
from specserve.layers.config import LayerConfig
from specserve.layers.linear import Linear
from specserve.layers.norms import RMSNorm
from specserve.layers.ranks import Update


class Convolution(nn.Module):
    """The weights of a convolution over the last tokens, channel by channel."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.shares = {"weight": channels}


class GatedDeltaNet(nn.Module):
    """A block in the place of attention. ``layer``: its number in the model; ``index``: among the layers that keep a
    state. Decay and correction have 16 bits in quantized files, so that they are a projection of their own.
    ``grouped``: files have the parts of either projection together, by key head. Each rank has some key heads with
    their value heads, and the sum over ranks follows ``out_proj``."""

    grouped: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, state: DeltaState, layer: int, index: int) -> None:
        super().__init__()
        self.index, self.state, self.ranks = index, state, config.ranks
        self.shares = dict.fromkeys(("A_log", "dt_bias"), state.value_heads)
        name, size, new = f"layers.{layer}.linear_attn", config.hidden_size, config.weights.projection
        channels, values = sum(state.parts), state.parts[-1]
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        many = {"in_proj_qkv": channels, "in_proj_z": values}
        few = {"in_proj_b": state.value_heads, "in_proj_a": state.value_heads}
        if self.grouped:
            heads, group = state.key_heads, state.value_heads // state.key_heads
            many = {"in_proj_qkvz": heads * ((channels + values) // heads)}
            few = {"in_proj_ba": heads * (2 * group)}
        self.in_proj_qkvz, self.in_proj_ba = (new(name, size, parts, bias=False) for parts in (many, few))
        if self.grouped:
            self.in_proj_qkvz.order_O = _by_part((*state.parts, values), heads)
            self.in_proj_ba.order_O = _by_part([state.value_heads] * 2, heads)
        self.in_proj_qkvz.shares_inputs = True
        self.conv1d = Convolution(channels, state.width)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(state.value_heads, dtype=wide)) for _ in range(2)
        )
        self.norm = RMSNorm(state.value_size, config.rms_norm_eps)
        self.out_proj = new(name, values, {"out_proj": size}, bias=False)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Update, Tensor]:
        """Return the wanted rows; the state takes all."""
        assert isinstance(call.attend, Recurs), "training does not run it"
        mixed_TC, gate_TI, b_TV, a_TV = self.projected(x_TH)
        weight_CK, own = self.conv1d.weight[:, 0], (self.A_log, self.dt_bias)
        out_TI = call.attend.recur(DeltaRule(self.index, mixed_TC, weight_CK, b_TV, a_TV, *own))
        out_TI, gate_TI, residual_TH = map(call.wanted, (out_TI, gate_TI, residual_TH))
        gate_TVU, norm = gate_TI.unflatten(1, (-1, self.state.value_size)), (self.norm.weight, self.norm.eps)
        read_TI = gate_heads(out_TI, gate_TVU, norm, self.out_proj.rounds_to(len(out_TI)))
        return self.ranks.sum_for_norm(self.out_proj(read_TI)), residual_TH

    def projected(self, x_TH: Tensor | Rounded) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the convolution and of the gate, and those of correction and decay."""
        many, few, given_TH = self.in_proj_qkvz, self.in_proj_ba, given(x_TH)
        many_TX, tokens = many(x_TH), len(given_TH)
        if isinstance(few, Linear) and few.is_plain:
            few_TX = linear_ahead(given_TH, few.weight)
        else:
            few_TX = few(x_TH if few.rounds_to(tokens) == many.rounds_to(tokens) else given_TH)
        parts = self.state.parts
        mixed_TC, gate_TI = many_TX.split((sum(parts), parts[-1]), -1)
        b_TV, a_TV = few_TX.chunk(2, -1)
        return mixed_TC, gate_TI, b_TV, a_TV


def _by_part(sizes: Sequence[int], heads: int) -> Tensor:
    """Return where the channels of parts of these sizes lie in files, which have each key head's together."""
    index_JX = torch.arange(sum(sizes), device="cpu").view(heads, -1)
    return torch.cat([each.flatten() for each in index_JX.split([size // heads for size in sizes], 1)])
