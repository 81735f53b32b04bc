"""What a layer with latent attention asks, and stores: see ``latent_attention``.

Shapes: T tokens, N heads, C size of a latent, X of a latent and a rotated key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specserve_kernels import HeadNorms
from torch import Tensor

from specserve.layers.rotary import Rope


class LatentRows(NamedTuple):
    """What all heads read of each token: a latent, not normalized by ``norm_C`` yet, and a key, not rotated yet. Values
    are the normalized latents."""

    row_TX: Tensor
    norm_C: Tensor
    eps: float


Projected = tuple[Tensor, HeadNorms | None] | LatentRows
"""What ``project_kv`` of either kind of attention returns."""


@dataclass(frozen=True, slots=True)
class Latent:
    """What a layer with latent attention asks. ``query_TNX``: absorbed and rotated. ``scale``: as in ``Softmax``."""

    layer: int
    query_TNX: Tensor
    rows: LatentRows
    rope: Rope
    scale: float | None
