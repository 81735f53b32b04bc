"""Block drafts: a few layers that draft a whole block of tokens in one pass.

DFlash: Chen et al. 2026, arXiv 2602.06036. A block is the root followed by mask tokens. Its tokens attend to each other
in both directions, and to the text, whose keys and values every layer projects from ``hidden_norm(fc(states))`` of the
target's states. Others add a head that corrects a slot's scores along each path: DSpark (arXiv 2607.05147) by the token
before the slot, Domino (arXiv 2605.29707) by all tokens before it, DFlash2 by the token before it and only for the most
likely candidates. DSpark also has a confidence head, and DFlash2 short convolutions along the block.

Shapes: B slots, N tokens of all blocks or nodes of a level, T target tokens, H hidden size, R size of a correction's
memory, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from specserve_kernels import HeadNorms, Rounded
from torch import Tensor, nn

from specserve.layers.batch import Attend, LayerCall
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import Attention, DecoderLayer
from specserve.layers.embedding import make_head
from specserve.layers.linear import PLAIN, Linear
from specserve.layers.norms import RMSNorm
from specserve.layers.ranks import ONE, Ranks, Update, summed
from specserve.layers.rotary import Rope, RopeConfig, rope_table
from specserve.models.base import TargetModel
from specserve.models.draft.load import Borrowed, DraftModule

MarkovKind = Literal["vanilla", "gated", "rnn"]
CorrectionKind = MarkovKind | Literal["domino", "selector"]
CONFIDENCE = "confidence_head.proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The configuration of a block draft. ``taps``: boundaries of the target's residual stream, in the order in which
    ``fc`` reads them. ``after``: slot k scores the token after it; otherwise the token at it, and slot 0, the root,
    scores nothing. ``levels``: tokens that a block drafts. ``own_head``: it scores ``draft_vocab_size`` tokens with its
    own head. ``correction``: the head that corrects scores, if any. ``rank``: its width. ``memory``: size of Domino's
    state. ``candidates``: tokens that DFlash2 chooses from. ``confidence``: inputs of the confidence head, 0: none;
    more than the hidden size if it also reads the Markov head's embedding of the token before. ``conv``: slots that a
    convolution mixes and channels that share its weights; None: no convolutions. ``ranks``: share out ``own_head``."""

    layer: LayerConfig
    num_layers: int
    rope: RopeConfig
    taps: tuple[int, ...]
    block_size: int
    mask_id: int
    after: bool
    levels: int
    draft_vocab_size: int
    own_head: bool = False
    correction: CorrectionKind | None = None
    rank: int = 0
    memory: int = 0
    candidates: int = 0
    confidence: int = 0
    conv: tuple[int, int] | None = None
    ranks: Ranks = ONE


class MarkovHead(nn.Module):
    """Adds a correction from the token before a slot to its scores: ``w2`` applied to its embedding ``w1``. The gated
    kind weights the embedding by the slot's state; the recurrent kind keeps a state along the path."""

    def __init__(self, kind: MarkovKind, rank: int, hidden: int, vocab: int, rows: int) -> None:
        super().__init__()
        self._kind = kind
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = Linear(rank, rows, bias=False)
        if kind == "gated":
            self.gate_proj = Linear(hidden + rank, rank)
        elif kind == "rnn":
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, logits_NV: Tensor, tokens_N: Tensor, states_NH: Tensor, memory_NR: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Correct the scores, as ``BlockHead.correct``."""
        e_NR = self.markov_w1(tokens_N)
        if self._kind == "gated":
            e_NR = torch.sigmoid(self.gate_proj(torch.cat([states_NH, e_NR], 1))) * e_NR
        elif self._kind == "rnn":
            before_NR = torch.zeros_like(e_NR) if memory_NR is None else memory_NR
            joint = self.joint_proj(torch.cat([before_NR, e_NR, states_NH], 1))
            keep_NR, new_NR, out_NR = joint.chunk(3, 1)
            keep_NR = torch.sigmoid(keep_NR)
            memory_NR = keep_NR * before_NR + (1 - keep_NR) * torch.tanh(new_NR)
            e_NR = torch.tanh(out_NR)
        return logits_NV + self.markov_w2(e_NR), memory_NR


class PrefixGRU(nn.Module):
    """A gated recurrent unit without biases over embeddings of the tokens before a slot."""

    def __init__(self, hidden: int, memory: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * memory, hidden))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * memory, memory))

    def forward(self, x_NH: Tensor, memory_NR: Tensor | None) -> Tensor:
        if memory_NR is None:
            memory_NR = x_NH.new_zeros(len(x_NH), self.weight_hh_l0.shape[1])
        reset_NR, keep_NR, new_NR = nn.functional.linear(x_NH, self.weight_ih_l0).chunk(3, 1)
        own = nn.functional.linear(memory_NR, self.weight_hh_l0).chunk(3, 1)
        keep_NR = torch.sigmoid(keep_NR + own[1])
        new_NR = torch.tanh(new_NR + torch.sigmoid(reset_NR + own[0]) * own[2])
        return keep_NR * memory_NR + (1 - keep_NR) * new_NR


class DominoHead(nn.Module):
    """Adds a correction from all tokens before a slot to its scores, from the second level on. ``embed`` is the
    target's."""

    def __init__(self, embed: nn.Embedding, rank: int, memory: int, rows: int) -> None:
        super().__init__()
        hidden, self._embed = embed.embedding_dim, Borrowed(embed)
        self.prefix_gru = PrefixGRU(hidden, memory)
        self.embed_proj = nn.Sequential(
            Linear(hidden + memory, rank, bias=False), nn.SiLU(), Linear(rank, rows, bias=False)
        )

    def forward(
        self, logits_NV: Tensor, tokens_N: Tensor, states_NH: Tensor, memory_NR: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Correct the scores, as ``BlockHead.correct``."""
        after_NR = self.prefix_gru(self._embed.module(tokens_N), memory_NR)
        if memory_NR is not None:
            logits_NV = logits_NV + self.embed_proj(torch.cat([states_NH, after_NR], 1))
        return logits_NV, after_NR


class CandidateSelector(nn.Module):
    """Rescores the ``count`` most likely tokens of a slot by the token before it; all others become impossible."""

    def __init__(self, count: int, rank: int, hidden: int, vocab: int, rows: int) -> None:
        super().__init__()
        self._count = count
        self.hidden_projection = Linear(hidden, rank, bias=False)
        self.predecessor_codebook = nn.Embedding(vocab, rank)
        self.successor_codebook = nn.Embedding(rows, rank)

    def forward(
        self, logits_NV: Tensor, tokens_N: Tensor, states_NH: Tensor, memory_NR: Tensor | None
    ) -> tuple[Tensor, None]:
        """Correct the scores, as ``BlockHead.correct``."""
        top = logits_NV.topk(min(self._count, logits_NV.shape[1]), dim=-1)
        key_NR = self.predecessor_codebook(tokens_N) * self.hidden_projection(states_NH)
        follows_NC = (self.successor_codebook(top.indices) @ key_NR[:, :, None])[:, :, 0]
        out_NV = torch.full_like(logits_NV, -torch.inf)
        return out_NV.scatter_(1, top.indices, top.values + follows_NC), None


class BlockConv(nn.Module):
    """Mixes each slot with the slots right before it in its block, before and after a sublayer. The weights depend on
    the sublayer's input."""

    def __init__(self, hidden: int, block: int, taps: int, group: int) -> None:
        super().__init__()
        self._block = block
        self._group = group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def weights(self, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights before and after the sublayer that reads ``x_NH``: ``[N, taps, H]`` each."""
        added = self.kernel_projection(x_NH).unflatten(1, (2, self.base_kernel.shape[1], -1))
        before, after = (self.base_kernel + added.repeat_interleave(self._group, -1)).unbind(1)
        return before, after

    def mix(self, x_NH: Tensor, weights_NTH: Tensor) -> Tensor:
        x_BKH = x_NH.view(-1, self._block, x_NH.shape[1])
        shifted = [
            nn.functional.pad(x_BKH, (0, 0, back, 0))[:, : self._block]
            for back in range(weights_NTH.shape[1])
        ]
        return (weights_NTH * torch.stack(shifted, 2).flatten(0, 1)).sum(1)


class ConvLayer(DecoderLayer):
    """A decoder layer with DFlash2's convolutions around attention and MLP."""

    def __init__(self, config: LayerConfig, layer: int, block: int, conv: tuple[int, int]) -> None:
        super().__init__(config, layer)
        self.attention_conv = BlockConv(config.hidden_size, block, *conv)
        self.mlp_conv = BlockConv(config.hidden_size, block, *conv)

    def enter(self, x_TH: Update, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self.input_layernorm.add(x_TH, residual_TH)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor, call: LayerCall) -> tuple[Tensor, Tensor]:
        assert isinstance(x_TH, Tensor), "convolutions take unquantized inputs"
        conv = self.attention_conv
        before, after = conv.weights(x_TH)
        out_TH, residual_TH = self.self_attn(conv.mix(x_TH, before), residual_TH, call)
        x_TH, residual_TH = self.post_attention_layernorm.add(conv.mix(summed(out_TH), after), residual_TH)
        conv = self.mlp_conv
        before, after = conv.weights(x_TH)
        out_TH, residual_TH = self.mlp(conv.mix(x_TH, before), residual_TH)
        return conv.mix(summed(out_TH), after), residual_TH


class BlockHead(DraftModule):
    """A block draft. It uses the target's embedding and, without its own head, the target's. Its layers run as pool
    layers from ``layer`` on."""

    rope_P2R: Tensor

    def __init__(self, config: BlockConfig, layer: int, max_positions: int, target: TargetModel) -> None:
        super().__init__()
        self.config = config
        size, eps, vocab = config.layer.hidden_size, config.layer.rms_norm_eps, target.config.vocab_size
        self._embed, self._lm_head = Borrowed(target.embed_tokens), Borrowed(target.lm_head)
        self.fc = Linear(len(config.taps) * target.config.hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, layer + i)
            if config.conv is None
            else ConvLayer(config.layer, layer + i, config.block_size, config.conv)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.vocab_size = rows = config.draft_vocab_size
        if config.own_head:
            self.lm_head = make_head(size, rows, PLAIN, config.ranks)
        if config.correction == "domino":
            self.domino = DominoHead(target.embed_tokens, config.rank, config.memory, rows)
        elif config.correction == "selector":
            self.candidate_selector = CandidateSelector(config.candidates, config.rank, size, vocab, rows)
        elif config.correction is not None:
            self.markov_head = MarkovHead(config.correction, config.rank, size, vocab, rows)
        if config.confidence:
            self.confidence_head = nn.ModuleDict({"proj": Linear(config.confidence, 1)})
        table = rope_table(config.rope, config.layer.head_dim, max_positions)
        self.register_buffer("rope_P2R", table, persistent=False)

    @property
    def unquantized(self) -> Collection[str]:
        return [CONFIDENCE]  # too small

    def past(self, tapped: Sequence[Tensor]) -> Tensor:
        """Fuse the target's states at ``taps``, each or all side by side, into what blocks attend to: ``[T, H]``."""
        states_TX = torch.cat(list(tapped), -1) if len(tapped) > 1 else tapped[0]
        out: Tensor = self.hidden_norm(self.fc(states_TX))
        return out

    def project_kv(self, past_TH: Tensor) -> list[tuple[Tensor, HeadNorms | None]]:
        """Return each layer's keys and values of the text ``[T, 2 * kv heads, D]``, neither normalized nor rotated, and
        their norms."""
        attentions = [layer.self_attn for layer in self._decoders if isinstance(layer.self_attn, Attention)]
        return [attention.project_kv(past_TH) for attention in attentions]

    def forward(self, roots_B: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Return the states after the final norm ``[N, H]`` of blocks that begin with these roots."""
        tokens_BK = roots_B[:, None].repeat(1, self.config.block_size)
        tokens_BK[:, 1:] = self.config.mask_id
        call, first = LayerCall(Rope(self.rope_P2R, positions_N), attend), self._decoders[0]
        stream = first(*first.embed(tokens_BK.flatten(), self._embed.module), call)
        for layer in self._decoders[1:]:
            stream = layer(*layer.enter(*stream), call)
        return self.norm.add(*stream)[0]

    def scored(self, states_NH: Tensor) -> Tensor:
        """Return the states of the slots that score a token: ``[B, levels, H]``."""
        config = self.config
        states_BKH = states_NH.view(-1, config.block_size, states_NH.shape[1])
        return states_BKH[:, 1 - config.after :][:, : config.levels]

    def logits(self, states_NH: Tensor) -> Tensor:
        """Return scores over the draft vocabulary ``[N, Vd]``, not yet corrected."""
        out: Tensor = self.lm_head(states_NH) if self.config.own_head else self._lm_head.module(states_NH)
        return out

    def correct(
        self, logits_NV: Tensor, tokens_N: Tensor, states_NH: Tensor, memory_NR: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Correct the scores of slots with these states by the tokens before them. Return the scores and the memory
        after these tokens. ``memory_NR``: the memory before them, None at the root."""
        if self.config.correction is None:
            return logits_NV, None
        heads = {"domino": "domino", "selector": "candidate_selector"}
        head = self.get_submodule(heads.get(self.config.correction, "markov_head"))
        out: tuple[Tensor, Tensor | None] = head(logits_NV, tokens_N, states_NH, memory_NR)
        return out

    def confidence(self, tokens_N: Tensor, states_NH: Tensor) -> Tensor:
        """Return the log-odds ``[N]`` that the token drafted after each of these is accepted if all before it are."""
        read = states_NH
        if self.config.confidence > states_NH.shape[1]:
            read = torch.cat([states_NH, self.markov_head.markov_w1(tokens_N)], 1)
        out: Tensor = self.confidence_head["proj"](read)
        return out[:, 0]

    @property
    def _decoders(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
