"""Hydra: heads like Medusa's that also read the tokens drafted so far. In Hydra++ they come after a decoder layer over
the target's states.

Ankner et al. 2024, arXiv 2402.05109. Tensors as in ``hydra_lm_head.pt``: the layer and its norm are under
``prefix_embeding_layer``. Head ``i`` has a block over [state; embeddings] and a projection of the same to the state's
width (``hydra_mlp.i.1.linear``, ``.res_connection``), a block that runs several times and is stored each time
(``hydra_mlp.i.3.linear``, ``.5``, ...), and an output head (``hydra_lm_head.i.1``). The even numbers are dropout;
without the layer there is none, and the names are ``hydra_mlp.i.0``, ``.1``, ... and ``hydra_lm_head.i``. The layer has
the target's geometry.

Shapes: N nodes of a level, X rows of states, V vocabulary, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specserve.layers.linear import Linear
from specserve.layers.norms import RMSNorm
from specserve.models.base import TargetModel
from specserve.models.config import read_json
from specserve.models.draft.fields import check_same
from specserve.models.draft.head import DraftConfig, LayerHead
from specserve.models.draft.load import Borrowed, DraftSource, Network
from specserve.models.draft.medusa import ResidualBlock
from specserve.models.tensor_files import TensorFiles

_LAYER = "prefix_embeding_layer."
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")


@dataclass(frozen=True, slots=True)
class HydraSource(DraftSource):
    """A checkpoint of ``levels`` heads. ``blocks``: the numbers of each head's blocks, all but the first equal.
    ``layered``: it is Hydra++."""

    levels: int
    blocks: tuple[int, ...]
    layered: bool
    unread = (f"{_LAYER}embed_tokens.weight", "input_embed_fn.weight")  # the target's, or unused

    def stored(self, name: str) -> str:
        kind, *rest = name.split(".")
        if kind == "first":
            return f"hydra_mlp.{rest[0]}.{self.blocks[0]}.{'.'.join(rest[1:])}"
        if kind == "block":
            return f"hydra_mlp.{rest[0]}.{self.blocks[1]}.{'.'.join(rest[1:])}"
        if kind == "heads":
            plain = "hydra_lm_head.0.weight" in self.files
            return f"hydra_lm_head.{rest[0]}.{rest[1] if plain else f'1.{rest[1]}'}"
        return f"{_LAYER}{'.'.join(rest)}" if rest[0] == "norm" else f"{_LAYER}layers.0.{'.'.join(rest)}"

    @property
    def copies(self) -> Mapping[str, str]:
        names = [f"{i}.{{}}.linear.{part}" for i in range(self.levels) for part in ("weight", "bias")]
        return {
            f"hydra_mlp.{name.format(number)}": f"hydra_mlp.{name.format(self.blocks[1])}"
            for number in self.blocks[2:]
            for name in names
        }


def open_hydra(path: Path) -> HydraSource:
    """Read a directory. Raises ValueError naming the tensor or field if it holds no such heads."""
    files, file = TensorFiles(path), path / "config.json"
    found = {(int(m[1]), int(m[2])) for m in map(_BLOCK.fullmatch, files.names()) if m}
    if not found:
        raise ValueError(
            f"{path} holds no Hydra heads: expected tensors like hydra_mlp.0.1.linear.weight, found {files.contents}"
        )
    layered = any(name.startswith(_LAYER) for name in files.names())
    arch = "prefix-mlp" if layered else "mlp"
    wanted = {"hydra_head_arch": arch, "grounded_heads": True, "hidden_state_offset": 0}
    check_same(read_json(file), file, wanted.items())
    heads, blocks = 1 + max(i for i, _ in found), tuple(sorted({number for _, number in found}))
    after = " after a layer over the target's states" if layered else ""
    note = f"draft of {heads} heads of {len(blocks)} blocks{after}"
    return HydraSource(files, heads, blocks, layered, notes=[note])


class FirstBlock(nn.Module):
    """``project(x) + SiLU(linear(x))``: maps several concatenated vectors to one."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.linear, self.res_connection = Linear(inputs, size, bias=True), Linear(inputs, size, bias=True)

    def forward(self, x_NI: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x_NI) + nn.functional.silu(self.linear(x_NI))
        return out


class HydraLayer(LayerHead):
    """The layer, which reads the target's states alone, and its norm."""

    def __init__(self, target: TargetModel) -> None:
        own, vocab, size = target.config.draft_layer, target.config.vocab_size, target.config.hidden_size
        config = DraftConfig(
            layer=replace(own, input_size=size),
            rope=target.config.rope,
            target_hidden_size=size,
            target_vocab_size=vocab,
            draft_vocab_size=vocab,
            recycle_normed=True,
        )
        super().__init__(config, target.embed_tokens)
        self._add_layer(target.config.kv_layers, target.max_positions)
        self.input_layernorm, self.norm = (RMSNorm(size, own.rms_norm_eps) for _ in range(2))

    def _inputs(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        state_NH = features_XH if source_N is None else features_XH[source_N]
        return self.input_layernorm(state_NH), state_NH


class HydraHeads(Network):
    """The heads, and the layer if they come after one."""

    def __init__(self, source: HydraSource, target: TargetModel) -> None:
        super().__init__()
        size, self.vocab_size = target.config.hidden_size, target.config.vocab_size
        count, self._repeats = source.levels, len(source.blocks) - 1
        self.layer = HydraLayer(target) if source.layered else None
        self.first = nn.ModuleList(FirstBlock((i + 2) * size, size) for i in range(count))
        self.block = nn.ModuleList(
            ResidualBlock(size, bias=True) for _ in range(count if self._repeats else 0)
        )
        self.heads = nn.ModuleList(Linear(size, self.vocab_size, bias=True) for _ in range(count))
        self._embed = Borrowed(target.embed_tokens)

    def forward(self, level: int, tokens_N: Tensor, states_XH: Tensor, source_N: Tensor) -> Tensor:
        # A path is a state and the embeddings of root and path.
        return torch.cat([states_XH[source_N], self._embed.module(tokens_N)], 1)

    def scores(self, level: int, states_NH: Tensor) -> Tensor:
        x_NH = self.first[level](states_NH)
        for _ in range(self._repeats):
            x_NH = self.block[level](x_NH)
        out: Tensor = self.heads[level](x_NH)
        return out
