"""What the step needs of a drafter that runs a head over the target's features.

Shapes: T target tokens, N tokens to draft from, X rows of features, H feature size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specserve.kv.pool import KVPool
from specserve.kv.spec import KVSpec
from specserve.layers.batch import Attend
from specserve.speculation.dynamic_map import LiveMap, MapPlan
from specserve.speculation.sampler import VocabMap


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What a user may say of a draft. It drafts the tokens that the file ``token_map`` lists alone, or those that a
    plan's live map chooses; ``config_override``: a JSON object that goes before its config; ``rounded_to``: its
    weights are, int8 (with what they multiply) or float8_e4m3fn."""

    token_map: Path | MapPlan | None = None
    config_override: str | None = None
    rounded_to: torch.dtype | None = None


class Drafter(Protocol):
    """One method's head, bound to its layers of the KV pool."""

    name: str
    needs_tokens: bool  # wants each step's tokens on the host, which rules out overlap
    taps: tuple[int, ...]  # boundaries of the target's residual stream it reads
    reads_last_layer: bool  # wants what comes behind the target's last layer, of every token
    feature_size: int
    kv: Sequence[KVSpec]
    vocab: VocabMap | None  # None: the target's vocabulary
    live_map: LiveMap | None  # chooses the vocabulary while serving; None: it stays

    @property
    def vocab_size(self) -> int:
        """Tokens it can draft."""
        ...

    def pick(self, rows_R: Tensor) -> None:
        """Drafts by these rows of its head from the next step on, those that ``live_map`` chose: int64 on the device.
        Changes tensors in place and waits for nothing."""
        ...

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """The features ``[T, H]`` of target tokens, from their states after the final norm and at ``taps``."""
        ...

    def forward(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor, positions_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """One level: logits ``[N, Vd]`` for the next token, and the features ``[N, H]`` its children draft from.

        The feature beside a token is that of the token before it, row ``source_N`` of ``features_XH``;
        ``positions_N`` are the tokens' own.
        """
        ...

    def store(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        source_N: Tensor | None,
        positions_N: Tensor,
        pool: KVPool,
        address: tuple[Tensor, Tensor],
    ) -> None:
        """Writes the final cache entries of (real feature, token) pairs at the tokens' ``(pages, offsets)``.

        ``source_N`` None: each pair's feature is in its own row.
        """
        ...
