"""The inputs of one forward pass, and what its layers ask of attention. Shapes: T tokens, N heads (q, then k, then v),
D head size, C size of a latent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from specserve_kernels import HeadNorms
from torch import Tensor

from specserve.layers.latent import Latent
from specserve.layers.rotary import Rope


@dataclass(frozen=True, slots=True)
class Softmax:
    """How scores become weights. ``scale`` multiplies them; None: ``1 / sqrt(D)``. ``window``: a token sees its own
    position and ``window - 1`` before it; None: all before it. ``sinks_H``: each query head's score of one more key,
    whose value is 0; None: there is none. ``cap``: c, if scaled scores s become ``c * tanh(s / c)``."""

    scale: float | None = None
    window: int | None = None
    cap: float | None = None
    sinks_H: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """What a layer asks: attention of its projections, whose query heads share key heads. ``layer`` is its index in the
    KV pool; ``qkv_TND`` is neither normalized by ``norms`` nor rotated. ``num_kv_heads`` 0: it has only queries, which
    attend to what ``layer`` has stored. ``query_parts``: heads for each query, which is the first of them."""

    layer: int
    qkv_TND: Tensor
    num_kv_heads: int
    rope: Rope
    softmax: Softmax = field(default_factory=Softmax)
    norms: HeadNorms | None = None
    query_parts: int = 1


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """What a gated delta net asks. ``layer``: its index among the layers that keep a state. ``x_TC``: the inputs of the
    convolution, which has ``weight_CK``. The others: those of ``delta_inputs``."""

    layer: int
    x_TC: Tensor
    weight_CK: Tensor
    b_TV: Tensor
    a_TV: Tensor
    rate_V: Tensor
    bias_V: Tensor


class Attend(Protocol):
    """Attention of a layer: normalize heads, rotate q and k, store k and v, attend. Paged, or dense in training."""

    def __call__(self, ask: GroupedQuery | Latent) -> Tensor:
        """Return ``[T, q heads * D]``, of latents ``[T, q heads * C]``. May overwrite ``ask.qkv_TND``."""
        ...


@runtime_checkable
class Recurs(Protocol):
    """Attention that also serves layers that keep a state: when serving, not when training."""

    def recur(self, ask: DeltaRule) -> Tensor:
        """Return ``[T, value heads * U]``."""
        ...


class LayerCall(NamedTuple):
    """What a layer needs besides the stream. It stores all keys and values and returns rows ``wanted_W``; None: all."""

    rope: Rope
    attend: Attend
    wanted_W: Tensor | None = None

    def wanted(self, each_TX: Tensor) -> Tensor:
        """Return the wanted rows."""
        return each_TX if self.wanted_W is None else each_TX[self.wanted_W]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The packed tokens of all requests; the only argument of a forward pass.

    ``taps``: boundaries of the residual stream to return (L: the input of layer L; 0: the embedding; the number of
    layers: the last layer's output before the final norm). ``wanted_W``: the only rows that are computed and returned
    after the last layer's attention; None: all.
    """

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64
    attend: Attend
    taps: Sequence[int] = ()
    wanted_W: Tensor | None = None
