"""The P-EAGLE draft head: EAGLE-3 with more layers, trained to draft all levels in one pass. Hui et al. 2026, arXiv
2602.01469.

The first layer is EAGLE-3's; those after it are plain decoder layers. A row of a token that is not known yet reads a
mask token and, in place of the target's states, ``mask_hidden``, which passes the same norms and ``fc`` as they do. Its
embedding is its own, trained with the mask token's row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specserve.layers.batch import Attend, LayerCall
from specserve.layers.decoder import DecoderLayer
from specserve.layers.ranks import Update
from specserve.layers.rotary import Rope
from specserve.models.config import COUNT, OBJECT, check, read_json
from specserve.models.draft.eagle3 import Eagle3Head

MOST_LEVELS = 18  # the published ones were trained for 8 to 18; of a pass's rows a slot has 64 at most


class PEagleHead(Eagle3Head):
    """``layer`` is the first of its ``num_layers`` layers."""

    def _add_layer(self, layer: int, max_positions: int) -> None:
        super()._add_layer(layer, max_positions)
        config = self.config
        more = replace(config.layer, input_size=config.layer.hidden_size)
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(more, layer + i) for i in range(1, config.num_layers)}
        )
        self.mask_hidden = nn.Parameter(torch.empty(config.mask_shape))

    def _layer(
        self,
        tokens_N: Tensor,
        features_XH: Tensor,
        positions_N: Tensor,
        attend: Attend,
        source_N: Tensor | None = None,
    ) -> tuple[Update, Tensor]:
        stream = super()._layer(tokens_N, features_XH, positions_N, attend, source_N)
        call = LayerCall(Rope(self.rope_P2R, positions_N), attend)
        for each in self.layers.values():
            assert isinstance(each, DecoderLayer)
            stream = each(*each.enter(*stream), call)
        return stream

    @torch.no_grad()
    def mask_feature(self) -> Tensor:
        """The feature of a row that reads the mask token: ``[1, H]``. Launches nothing for a head without numbers."""
        if self.mask_hidden.is_meta:
            return self.mask_hidden.new_empty(1, self.config.layer.hidden_size)
        states = self.mask_hidden.view(1, -1).split(self.config.target_hidden_size, dim=1)
        return self.fuse(states[0], states)


def count_levels(path: Path) -> int:
    """How many levels are drafted at most: as many as it was trained for, where its config says so. Raises ValueError
    naming the field if that is no such number."""
    file = path / "config.json"
    config = read_json(file)
    check(config, file, OBJECT, "speculators_config", optional=True)
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    said = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    check(said, file, COUNT, "speculative_tokens", optional=True)
    return min(said.get("speculative_tokens") or MOST_LEVELS, MOST_LEVELS)
