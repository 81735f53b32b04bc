"""The base class of EAGLE-style heads: one decoder layer over pairs of a token and a feature.

Shapes: N tokens to draft from, X rows of features, I input width of attention, H draft hidden size, Vd vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from specserve_kernels import GROUP, Rounded, pair_inputs, pair_inputs_rounded
from torch import Tensor, nn

from specserve.layers.batch import Attend, LayerCall
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import Attention, DecoderLayer, reader_of
from specserve.layers.embedding import Embedding, SharedHead
from specserve.layers.latent import Projected
from specserve.layers.latent_attention import LatentAttention
from specserve.layers.linear import Linear, rounds_in_place
from specserve.layers.norms import RMSNorm
from specserve.layers.ranks import ONE, Ranks, Update, summed
from specserve.layers.rotary import Rope, RopeConfig, rope_table
from specserve.layers.weights import Projection
from specserve.models.draft.load import Borrowed, DraftModule


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
    # Of a target's checkpoint.
    layer_class: type[DecoderLayer] = DecoderLayer
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
    ranks: Ranks = ONE  # which share out its own output head


class LayerHead(DraftModule):
    """A subclass builds the modules and defines the input of attention (``_inputs``).

    ``norm`` is applied before the output head, unless the configuration says otherwise.
    """

    norm: RMSNorm | None
    lm_head: Projection  # its own, if ``_lm_head`` is None
    rope_P2R: Tensor

    def __init__(self, config: DraftConfig, embed: Embedding) -> None:
        super().__init__()
        self.config = config
        if config.own_embedding:
            embed = self.embed_tokens = Embedding(config.target_vocab_size, config.layer.hidden_size)
        self.vocab_size = config.draft_vocab_size
        self._embed = Borrowed(embed)
        self._lm_head: Borrowed[nn.Module] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.module.weight.dtype  # a norm's weight may be wider

    def _add_layer(self, layer: int, max_positions: int) -> None:
        """Add the decoder layer, without its input norm. ``layer``: its number, in the pool too unless its config names
        another."""
        config = self.config.layer
        made = self.config.layer_class(config, layer)
        self.self_attn: Attention | LatentAttention = made.self_attn
        self.mlp = made.mlp
        self.post_attention_layernorm = made.post_attention_layernorm
        table = rope_table(self.config.rope, config.head_dim, max_positions)
        self.register_buffer("rope_P2R", table, persistent=False)

    def _new_norm(self, wanted: bool) -> RMSNorm | None:
        config = self.config.layer
        return RMSNorm(config.hidden_size, config.rms_norm_eps) if wanted else None

    def _inputs(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None
    ) -> tuple[Tensor | Rounded, Tensor]:
        """Return the input of attention ``[N, I]``, and the residual stream that it adds to ``[N, H]``."""
        raise NotImplementedError

    def _pairs(
        self,
        reader: nn.Module,
        tokens_N: Tensor,
        features_XH: Tensor,
        source_N: Tensor | None,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> tuple[Tensor | Rounded, Tensor]:
        """Return ``pair_inputs``, quantized if ``reader`` multiplies integers."""
        quantizes = isinstance(reader, Projection) and reader.rounds_to(len(tokens_N)) == torch.int8
        whole_groups = features_XH.shape[-1] % GROUP == 0
        make = pair_inputs_rounded if quantizes and whole_groups else pair_inputs
        return make(*self._embed.module.table(tokens_N), features_XH, source_N, norms)

    def _layer(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        positions_N: Tensor,
        attend: Attend,
        source_N: Tensor | None = None,
    ) -> tuple[Update, Tensor]:
        """Return the MLP's output, and the residual stream before that is added."""
        x_NI, residual_NH = self._inputs(tokens_N, features_XH, source_N)
        rope = Rope(self.rope_P2R, positions_N, self.config.rope.interleaved)
        stream = self.self_attn(x_NI, residual_NH, LayerCall(rope, attend))
        out: tuple[Update, Tensor] = self.mlp(
            *self.post_attention_layernorm.add_for(reader_of(self.mlp), *stream)
        )
        return out

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """Turn the target's states (after the final norm; at ``taps``, each or all side by side) into features ``[T,
        H]``: here the former."""
        return hidden_TH

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer over each token and feature row ``source_N`` (None: its own). Return the state ``[N, H]`` for
        ``logits`` and the next level. Arguments as for ``_layer``."""
        mlp_NH, residual_NH = self._layer(*args, **kwargs)
        norm = self._final_norm
        if norm is not None and self.config.recycle_normed:
            return norm.add(mlp_NH, residual_NH)[0]
        return residual_NH + summed(mlp_NH)

    def draft(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the ``logits`` of the states, and the states. Arguments as for ``_layer``."""
        norm = self._final_norm
        if norm is None or self.config.recycle_normed:
            states_NH: Tensor = self(*args, **kwargs)
            return self._scores(states_NH), states_NH
        read_NH, states_NH = norm.add_for(self.reader, *self._layer(*args, **kwargs))
        return self._scores(read_NH), states_NH

    def logits(self, states_NH: Tensor) -> Tensor:
        """Return the logits over the draft vocabulary ``[N, Vd]``."""
        norm = self._final_norm
        return self._scores(states_NH if norm is None or self.config.recycle_normed else norm(states_NH))

    @property
    def _final_norm(self) -> RMSNorm | None:
        return None if self.config.final_norm is False else self.norm

    @property
    def reader(self) -> nn.Module:
        """The output head: the target's, the embedding, or its own."""
        return self.lm_head if self._lm_head is None else self._lm_head.module

    def _scores(self, read_NH: Tensor | Rounded) -> Tensor:
        out: Tensor = self.reader(read_NH)
        return out

    def copy_head(self, plain: nn.Module) -> None:
        """Make a head of 16 or more bits, the target's, its own, so that it is quantized for drafts alone."""
        own = plain.own if isinstance(plain, SharedHead) else plain
        if isinstance(own, Linear):
            weight_VH, bias_V = own.rows(None)
            copied_VH = weight_VH.clone() if rounds_in_place(weight_VH) else weight_VH
            made = Linear.of(copied_VH, bias_V)
            self.lm_head, self._lm_head = plain.of(made) if isinstance(plain, SharedHead) else made, None

    @property
    def unquantized(self) -> Collection[str]:
        """The output head, unless all its rows are used."""
        return () if self._lm_head is None else ("lm_head", "lm_head.own")

    def project_kv(self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None = None) -> Projected:
        """Return what the layer stores of the pairs, neither normalized nor rotated."""
        return self.self_attn.project_kv(self._inputs(tokens_N, features_XH, source_N)[0])
