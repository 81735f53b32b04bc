"""EAGLE, EAGLE-2, EAGLE-3 and MiMo's MTP: one decoder layer that is run autoregressively over features.

Because the head has a single layer, its keys and values depend on the (feature, token) pair alone: storing an
entry is fc, norms and two projections, and prefill needs no attention at all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specserve.attention.paged import store_projected
from specserve.engine.sampler import VocabMap
from specserve.kv.pool import KVGeometry, KVPool
from specserve.layers.decoder import Attend
from specserve.layers.linear import pack_linears
from specserve.models.draft.base import DraftHead
from specserve.models.draft.head import LayerHead
from specserve.models.draft.load import load_draft
from specserve.models.draft.override import parse_overrides
from specserve.models.draft.token_map import read_token_map, truncate
from specserve.models.llama import LlamaModel

log = logging.getLogger(__name__)


class EagleDrafter:
    """Serves any ``DraftHead``; the heads differ, the drafting does not."""

    needs_tokens = False

    def __init__(self, name: str, head: DraftHead, layer: int, vocab: VocabMap | None) -> None:
        self.name = name
        self.vocab = vocab
        self._head = head
        self._layer = layer
        self.taps = head.config.taps
        self.reads_last_layer = not self.taps or self.taps[-1] == layer  # its own layer follows the target's
        self.feature_size = head.config.layer.hidden_size
        self.kv_layers: Sequence[KVGeometry] = [
            KVGeometry(head.config.layer.num_kv_heads, head.config.layer.head_dim)
        ]

    @classmethod
    def load(
        cls,
        name: str,
        path: Path,
        target: LlamaModel,
        layer: int,
        max_positions: int,
        dtype: torch.dtype,
        token_map: Path | None = None,
        config_override: str | None = None,
    ) -> EagleDrafter:
        """Loads the head at ``path`` to run as pool layer ``layer``. Raises ValueError for one that does not fit."""
        overrides = parse_overrides(config_override)
        loaded = load_draft(path, name, target, layer, max_positions, dtype, overrides)
        for note in loaded.notes:
            log.info("%s", note)
        pack_linears(loaded.head, keep=["qkv_proj"])  # ``project_kv`` reads rows of it
        ids = loaded.ids if token_map is None else _truncate(loaded.head, token_map, target)
        vocab = None if ids is None else VocabMap.of(ids, target.config.vocab_size)
        return cls(name, loaded.head, layer, vocab)

    @property
    def vocab_size(self) -> int:
        return self._head.config.draft_vocab_size if self.vocab is None else len(self.vocab.ids)

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return self._head.fuse(hidden_TH, tapped)

    def forward(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor, positions_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        return self._head.draft(tokens_N, features_XH, positions_N, attend, source_N)

    def store(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        source_N: Tensor | None,
        positions_N: Tensor,
        pool: KVPool,
        address: tuple[Tensor, Tensor],
    ) -> None:
        kv_N = self._head.project_kv(tokens_N, features_XH, source_N)
        rope_N2D = self._head.rope_P2D[positions_N]
        store_projected(pool, self._layer, kv_N, rope_N2D, *address)


def _truncate(head: LayerHead, token_map: Path, target: LlamaModel) -> Tensor:
    """Makes ``head`` draft the map's tokens alone. Their ids, ascending: in every order of the file the same are
    drafted, and rows that lie near each other are read together."""
    ids = read_token_map(token_map, target.config.vocab_size).sort().values.to(target.lm_head.weight.device)
    truncate(head, target.lm_head, ids)
    log.info("the draft reads %d of the head's %d rows: %s", len(ids), target.config.vocab_size, token_map)
    return ids
