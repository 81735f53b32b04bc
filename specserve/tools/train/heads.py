"""What fresh drafts share: layers like their target's, the scale of scores, and the draft vocabulary."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specserve.layers.rotary import RopeConfig
from specserve.models.config import ModelConfig
from specserve.models.draft.head import DraftConfig
from specserve.tools.train.packing import Documents


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
    layer = target.draft_layer
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


def draft_vocabulary(sources: Sequence[Documents], vocab_size: int, size: int) -> Tensor:
    """Return the ``size`` most frequent learned tokens, ascending, int64. Ties and gaps go to the lowest ids."""
    if not 0 < size <= vocab_size:
        raise ValueError(f"--draft-vocab-size must be in [1, {vocab_size}], found {size}")
    counts = _count([np.asarray(each.tokens)[np.asarray(each.mask, bool)] for each in sources], vocab_size)
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))


def unused_token(sources: Sequence[Documents], vocab_size: int) -> int:
    """Return the last token that no text contains, to use as mask token. Raises ValueError if there is none."""
    (unused,) = np.nonzero(_count([np.asarray(each.tokens) for each in sources], vocab_size) == 0)
    if not len(unused):
        raise ValueError(
            "--mask-token: the data contain all tokens of the vocabulary; give one that is rare in texts"
        )
    return int(unused[-1])


def _count(texts: Sequence[npt.NDArray[Any]], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return how often each token occurs. Raises ValueError for one that the target lacks."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        if len(text) and text.max() >= vocab_size:
            raise ValueError(f"the data holds token {text.max()}, the target's vocabulary is {vocab_size}")
        counts += np.bincount(text.astype(np.int64), minlength=vocab_size)
    return counts


def offsets(draft_ids: Tensor) -> Tensor:
    """Return ``d2t`` of a published file, int64 ``[Vd]``: target id minus draft id."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def membership(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Return ``t2d`` of a published file, bool ``[V]``: which target tokens are in the draft vocabulary."""
    inside = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    inside[draft_ids] = True
    return inside
