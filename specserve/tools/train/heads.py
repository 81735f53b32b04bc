"""What fresh drafts with layers like their target's share."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specserve.layers.linear import PLAIN
from specserve.layers.rotary import RopeConfig
from specserve.models.config import ModelConfig
from specserve.models.draft.base import DraftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Differences of a draft from a layer of its target; None: as in the target."""

    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    rope_theta: float | None = None
    taps: tuple[int, ...] | None = None

    @classmethod
    def of(cls, args: Namespace) -> HeadOptions:
        """Return those of a command line."""
        return cls(
            intermediate_size=args.draft_intermediate_size,
            num_heads=args.draft_num_heads,
            num_kv_heads=args.draft_num_kv_heads,
            rope_theta=args.rope_theta,
            taps=tuple(args.aux_layers) if args.aux_layers else None,
        )


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
