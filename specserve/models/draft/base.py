"""What every EAGLE-family draft head is to the rest of the code.

Shapes: N tokens to draft from, X rows of features, H draft hidden size, Ht target hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specserve.layers.batch import Attend
from specserve.layers.decoder import LayerConfig
from specserve.layers.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What a draft head is built from. ``taps`` are boundaries of the target's residual stream, in order; none: the
    head reads the state after the target's final norm.

    What stands below ``fc_bias`` is how published heads differ from those of the papers, whose values are the defaults.
    """

    layer: LayerConfig
    rope: RopeConfig
    target_hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] = ()
    fc_bias: bool = False
    own_embedding: bool = False  # the head has its own embedding instead of the target's
    recycle_normed: bool = False  # the state after the head's final norm is the next level's feature
    # EAGLE: norms beside those of the paper.
    embedding_norm: bool = False
    feature_norm: bool = False
    input_norm: bool = False  # before the attention
    # EAGLE-3.
    fuse: bool = True  # ``fc`` stands between the target's states and the features
    joint_norm: bool = False  # of the target's states, concatenated
    tap_norms: bool = False  # of each of the target's states
    residual_normed: bool = False  # the residual stream begins with the normed feature
    tied: bool = False  # the embedding scores, too
    final_norm: bool | None = None  # a norm before the scores; None: as in the paper


class DraftHead(Protocol):
    """One autoregressive layer over (feature of token i, token i + 1) pairs that predicts token i + 2."""

    config: DraftConfig
    rope_P2D: Tensor  # cos and sin of every position

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """Turns the target's states (after the final norm; at ``taps``) into features ``[T, H]``."""
        ...

    def __call__(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        positions_N: Tensor,
        attend: Attend,
        source_N: Tensor | None = None,
    ) -> Tensor:
        """Runs the layer over each token and feature row ``source_N`` (None: its own). Returns the state ``[N, H]``
        that is both read by ``logits`` and recycled."""
        ...

    def draft(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        positions_N: Tensor,
        attend: Attend,
        source_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``logits`` of the states, and the states."""
        ...

    def logits(self, states_NH: Tensor) -> Tensor:
        """Scores over the draft vocabulary ``[N, Vd]``."""
        ...

    def project_kv(self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None = None) -> Tensor:
        """Keys and values of the pairs, not yet rotated: ``[N, 2 * kv heads, D]``."""
        ...
