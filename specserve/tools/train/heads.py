"""Fresh draft heads for a target, ready to train."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specserve.layers.linear import PLAIN, Linear
from specserve.layers.rotary import RopeConfig
from specserve.models.config import ModelConfig
from specserve.models.draft.base import DraftConfig
from specserve.models.draft.block import BlockConfig, BlockHead, MarkovKind
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.draft.medusa import MedusaHeads
from specserve.models.draft.mlp_speculator import MLPSpeculator, SpeculatorConfig
from specserve.models.llama import LlamaModel
from specserve.tools.train.target import check_block_taps, check_taps, default_block_taps, default_taps


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Differences of a draft from a layer of its target; None: as in the target."""

    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    rope_theta: float | None = None
    taps: tuple[int, ...] | None = None


def draft_config(
    target: ModelConfig, options: HeadOptions, input_layers: int, draft_vocab: int
) -> DraftConfig:
    """Return a draft's configuration. Its rotary embedding has the target's base without scaling."""
    layer = target.layers[-1]
    heads = options.num_heads or layer.num_heads
    kv_heads = options.num_kv_heads or min(heads, layer.num_kv_heads)
    if heads % kv_heads:
        raise ValueError(f"--draft-num-heads {heads} is not a multiple of --draft-num-kv-heads {kv_heads}")
    layer = replace(
        layer,
        intermediate_size=options.intermediate_size or layer.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        input_size=input_layers * layer.hidden_size,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        weights=PLAIN,
    )
    return DraftConfig(
        layer=layer,
        rope=RopeConfig(theta=options.rope_theta or target.rope.theta),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
    )


def spread(rows_VH: Tensor) -> Tensor:
    """Return the deviation among the scores that output rows give to a state of random direction and size 1 (root mean
    square). It is 4 to 6 for many targets, so a fresh draft would be sure of random tokens."""
    deviation: Tensor = torch.linalg.vector_norm(rows_VH, dim=1).median()
    return deviation


@torch.no_grad()
def make_eagle(target: LlamaModel, options: HeadOptions, max_positions: int) -> EagleHead:
    """Return a random EAGLE head on the target's device, in float32. ``fc`` starts such that embedding and feature
    count alike and scores have a deviation of about 1."""
    config = draft_config(target.config, options, 1, target.config.vocab_size)
    with target.device:
        head = EagleHead(config, 0, max_positions, target.embed_tokens, target.lm_head)
    embedding, feature = spread(target.embed_tokens.weight), target.norm.weight.norm()
    size = spread(target.lm_head.rows(None)[0]) * (3 * config.layer.hidden_size) ** -0.5
    for columns, of in zip(head.fc.get_parameter("weight").chunk(2, 1), (embedding, feature), strict=True):
        columns.div_(of * size)
    return head


@torch.no_grad()
def make_eagle3(
    target: LlamaModel, options: HeadOptions, max_positions: int, draft_ids: Tensor
) -> Eagle3Head:
    """Return an EAGLE-3 head on the target's device, in float32. Its output head starts as the target's, times the
    target's norm, with scores of deviation 1; the rest starts random."""
    taps = options.taps or default_taps(target.config.num_layers)
    check_taps(taps, target.config.num_layers)
    config = replace(draft_config(target.config, options, 2, len(draft_ids)), taps=taps)
    with target.device:
        head = Eagle3Head(config, 0, max_positions, target.embed_tokens)
    rows_VH = target.lm_head.rows(draft_ids)[0] * target.norm.weight
    head.lm_head.rows(None)[0].copy_(rows_VH / spread(rows_VH))
    return head


@torch.no_grad()
def make_block(
    target: LlamaModel,
    options: HeadOptions,
    max_positions: int,
    *,
    layers: int,
    block_size: int,
    mask_id: int,
    markov: MarkovKind | None = None,
    rank: int = 0,
) -> BlockHead:
    """Return a DFlash draft, or with ``markov`` a DSpark draft with a confidence head, on the target's device in
    float32. The norm starts as the target's, with scores of deviation 1, the Markov head's output as 0, the rest
    random."""
    base = draft_config(target.config, options, 1, target.config.vocab_size)
    taps = options.taps or default_block_taps(target.config.num_layers)
    check_block_taps(taps, target.config.num_layers)
    config = BlockConfig(
        layer=replace(base.layer, qk_norm=True),
        num_layers=layers,
        rope=base.rope,
        taps=taps,
        block_size=block_size,
        mask_id=mask_id,
        after=markov is not None,
        levels=block_size - (markov is None),
        draft_vocab_size=target.config.vocab_size,
        correction=markov,
        rank=rank,
        confidence=base.layer.hidden_size + rank if markov else 0,
    )
    with target.device:
        head = BlockHead(config, 0, max_positions, target)
    norm = target.norm.weight
    head.norm.weight.copy_(norm / spread(target.lm_head.rows(None)[0] * norm))
    if markov is not None:
        head.markov_head.markov_w2.weight.zero_()
    return head


@torch.no_grad()
def make_medusa(target: LlamaModel, heads: int, blocks: int, scorers: int) -> MedusaHeads:
    """Return Medusa heads on the target's device, in float32, that start with the target's own predictions.
    ``scorers``: as many as heads, or 0, where all use the target's head."""
    vocab = target.config.vocab_size
    with target.device:
        made = MedusaHeads(target, heads, blocks, bias=True, scorers=scorers, rows=vocab)
    for block in made.heads.parameters():
        block.zero_()
    for scorer in made.lm_heads:
        assert isinstance(scorer, Linear)
        scorer.weight.copy_(target.lm_head.rows(None)[0])
    return made


@torch.no_grad()
def make_mlp_speculator(target: LlamaModel, levels: int, inner: int | None) -> MLPSpeculator:
    """Return a random MLP speculator on the target's device, in float32, whose levels share their weights.
    ``inner``: its channels, None: the target's."""
    inner = inner or target.config.hidden_size
    with target.device:
        made = MLPSpeculator(SpeculatorConfig(levels, inner, tied=True, scale_input=True), target)
    for name, parameter in made.named_parameters():
        if not name.startswith("ln."):
            parameter.normal_(0, inner**-0.5)
    return made
