"""The configuration of draft heads of the EAGLE family."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.layers.decoder import LayerConfig
from specserve.layers.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The configuration of a draft head. ``taps``: boundaries of the target's residual stream, in order; without any,
    the head reads the state after the target's final norm. The fields from ``fc_bias`` on are the ways in which
    published heads differ from the papers, whose values are the defaults."""

    layer: LayerConfig
    rope: RopeConfig
    target_hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] = ()
    fc_bias: bool = False
    own_embedding: bool = False  # the head has its own embedding instead of the target's
    recycle_normed: bool = False  # the state after the head's final norm is the next level's feature
    # EAGLE: norms in addition to those of the paper.
    embedding_norm: bool = False
    feature_norm: bool = False
    input_norm: bool = False  # before the attention
    # EAGLE-3.
    fuse: bool = True  # ``fc`` maps the target's states to features
    joint_norm: bool = False  # a norm over the target's concatenated states
    tap_norms: bool = False  # a norm for each of the target's states
    residual_normed: bool = False  # the residual stream begins with the normalized feature
    tied: bool = False  # the embedding is also the output head
    final_norm: bool | None = None  # a norm before the output head; None: as in the paper
    # P-EAGLE.
    num_layers: int = 1
    mask_id: int = 0
    mask_shape: tuple[int, ...] = ()  # of ``mask_hidden``
