"""The geometry of a decoder layer, and of its experts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from specserve_kernels import Gate, Routing

from specserve.kv.spec import DeltaState, HeadKV, KVSpec, LatentKV
from specserve.layers.batch import Softmax
from specserve.layers.linear import PLAIN
from specserve.layers.ranks import OF_EXPERTS, ONE, Ranks, ranges_of
from specserve.layers.weights import WeightFormat


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """``inner_size``: of each expert. ``shared_size``: of the MLP that all tokens go through too, 0: there is none;
    ``shared_gate``: its output is weighed by a sigmoid. ``router_bias``: the router's logits have one.
    ``correction``: so has its choice. ``module``: its name in files, ``parts`` those of an expert's projections (gate,
    up and down), and ``shared_module`` that of the MLP for all. ``own``: those that are held here, None: all."""

    routing: Routing
    inner_size: int
    shared_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    correction: bool = False
    module: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_module: str = "shared_expert"
    own: int | None = None

    @property
    def numbers(self) -> range:
        """Of the experts that are held here."""
        ((begin, end),) = ranges_of(self.routing.experts if self.own is None else self.own)
        return range(begin, end)

    def on(self, ranks: Ranks, unit: int) -> Self:
        """Return this rank's part: some experts, and of each its channels. The router is whole on each rank."""
        groups, group = ranks.of_experts()
        own = groups.share(self.routing.experts, "the number of experts", flag=OF_EXPERTS)
        inner = group.share(self.inner_size, "the inner size of experts", unit=unit)
        shared = ranks.share(self.shared_size, "the inner size of the shared expert", unit=unit)
        return replace(self, own=own, inner_size=inner, shared_size=shared)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention. ``rank``: size of the latent that a head's keys, of ``key_size``, and values, of
    ``value_size``, are made of; ``query_rank``: of that of queries, None: they are made of the layer's input. A query
    and a key have ``head_dim`` rotated channels more."""

    rank: int
    key_size: int
    value_size: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Geometry of one decoder layer. ``input_size``: input width of its q, k, v projections. ``qk_norm``: each head of
    q and k is normalized before rotation. ``rope``: which of the model's rotary embeddings rotates. ``softmax``: its
    scale and window; ``sinks``: its heads have them. ``index``: its place among those that keep the same kind of
    memory, None: its number. ``reads``: the layer whose keys and values it attends to, None: its own. Without
    ``v_proj`` its values are its keys before their norm. ``experts``: stand in place of its MLP.
    ``latent``: its attention is of this kind. ``state``: it keeps one instead of keys and values. ``weights``: how its
    projections are stored. ``ranks``: which share it out."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    input_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: int = 0
    softmax: Softmax = field(default_factory=Softmax)
    sinks: bool = False
    activation: Gate = "silu"
    index: int | None = None
    reads: int | None = None
    v_proj: bool = True
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    state: DeltaState | None = None
    weights: WeightFormat = PLAIN
    ranks: Ranks = field(default=ONE, repr=False, compare=False)

    @classmethod
    def of(cls, layer: LayerConfig, **changes: Any) -> Self:
        """Return a copy of this class, whose blocks have more to say, with other values."""
        return cls(**{each.name: getattr(layer, each.name) for each in fields(layer)} | changes)

    def on(self, ranks: Ranks) -> Self:
        """Return this rank's part: its heads, and its channels of the MLP or of experts. Raises ValueError naming
        a size that can't be shared out."""
        if ranks.count == 1:
            return self
        unit, state = self.weights.unit, self.state
        if state is not None:
            keys = ranks.share(state.key_heads, "linear_num_key_heads")
            values = ranks.share(state.value_heads, "linear_num_value_heads")
            state = replace(state, key_heads=keys, value_heads=values)
        return replace(
            self,
            state=state,
            num_heads=ranks.share(self.num_heads, "num_attention_heads"),
            num_kv_heads=ranks.share(self.num_kv_heads, "num_key_value_heads", repeat=True),
            intermediate_size=ranks.share(self.intermediate_size, "intermediate_size", unit=unit),
            experts=self.experts and self.experts.on(ranks, unit),
            ranks=ranks,
        )

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of q, k and v that it projects, in the order of a packed row."""
        kv_heads = self.num_kv_heads if self.reads is None else 0
        return self.num_heads, kv_heads, kv_heads if self.v_proj else 0

    def kv(self, dtype: torch.dtype) -> KVSpec:
        """Return the layout of its KV cache."""
        if self.latent is not None:
            return LatentKV(self.latent.rank, self.head_dim, dtype)
        return HeadKV(int(self.num_kv_heads), self.head_dim, dtype, window=self.softmax.window)
