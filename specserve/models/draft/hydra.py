"""Hydra++: heads like Medusa's that also read the tokens drafted so far, after a decoder layer over the target's
states.

Ankner et al. 2024, arXiv 2402.05109. Tensors as in ``hydra_lm_head.pt``: the layer and its norm are under
``prefix_embeding_layer``. Head ``i`` has a block over [state; embeddings] and a projection of the same to the state's
width (``hydra_mlp.i.1.linear``, ``.res_connection``), a block that runs several times and is stored each time
(``hydra_mlp.i.3.linear``, ``.5``, ...), and an output head (``hydra_lm_head.i.1``). The layer has the target's
geometry.

Shapes: N nodes of a level, X rows of states, V vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specserve.layers.decoder import RMSNorm
from specserve.layers.linear import PLAIN, Linear
from specserve.models.checkpoint import building, file_tensors, load_parameters
from specserve.models.draft.base import DraftConfig
from specserve.models.draft.fields import check_kind
from specserve.models.draft.head import LayerHead
from specserve.models.draft.medusa import ResidualBlock
from specserve.models.llama import LlamaModel
from specserve.models.tensor_files import TensorFiles

log = logging.getLogger(__name__)

_LAYER = "prefix_embeding_layer."
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_UNUSED = (f"{_LAYER}embed_tokens.weight", "input_embed_fn.weight")  # the target's, or unused


@dataclass(frozen=True, slots=True)
class HydraSource:
    """A checkpoint of ``heads`` heads. ``blocks``: the numbers of each head's blocks, all but the first equal."""

    path: Path
    files: TensorFiles
    heads: int
    blocks: tuple[int, ...]
    notes: list[str] = field(default_factory=list)

    def stored(self, name: str) -> str:
        """Return the file's name of a parameter."""
        kind, *rest = name.split(".")
        if kind == "first":
            return f"hydra_mlp.{rest[0]}.{self.blocks[0]}.{'.'.join(rest[1:])}"
        if kind == "block":
            return f"hydra_mlp.{rest[0]}.{self.blocks[1]}.{'.'.join(rest[1:])}"
        if kind == "heads":
            return f"hydra_lm_head.{rest[0]}.1.{rest[1]}"
        return f"{_LAYER}{name}" if kind == "norm" else f"{_LAYER}layers.0.{name}"

    def check_rest(self, parameters: list[str]) -> None:
        """Raise ValueError if copies of a block differ, and note tensors that nothing reads."""
        known = {*map(self.stored, parameters), *_UNUSED}
        for number in self.blocks[2:]:
            for name in (f"{i}.{{}}.linear.{part}" for i in range(self.heads) for part in ("weight", "bias")):
                copy, first = (f"hydra_mlp.{name.format(each)}" for each in (number, self.blocks[1]))
                if not torch.equal(self.files[copy], self.files[first]):
                    raise ValueError(
                        f"{self.files.file(copy)}: tensor {copy} differs from {first}, expected the same"
                    )
                known.add(copy)
        if unread := [name for name in self.files.names() if name not in known]:
            self.notes.append(f"draft tensors that are not read: {', '.join(unread)}")
            log.warning("%s: no parameter reads %s", self.path, ", ".join(unread))


def open_hydra(path: Path) -> HydraSource:
    """Read a directory. Raises ValueError naming what is missing if it holds no Hydra++ heads."""
    files = TensorFiles(path)
    found = {(int(m[1]), int(m[2])) for m in map(_BLOCK.fullmatch, files.names()) if m}
    if not found or f"{_LAYER}norm.weight" not in files:
        missing = f"{_LAYER}norm.weight" if found else "hydra_mlp.0.1.linear.weight"
        raise ValueError(
            f"{path} holds no Hydra++ heads: it has no {missing} in {files.where}; Hydra heads without the layer over "
            "the target's states are not supported"
        )
    heads, blocks = 1 + max(i for i, _ in found), tuple(sorted({number for _, number in found}))
    note = f"draft of {heads} heads of {len(blocks)} blocks after a layer over the target's states"
    return HydraSource(path, files, heads, blocks, [note])


def count_heads(path: Path) -> int:
    """Return how many levels a checkpoint drafts."""
    return open_hydra(path).heads


class FirstBlock(nn.Module):
    """``project(x) + SiLU(linear(x))``: maps several concatenated vectors to one."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.linear, self.res_connection = Linear(inputs, size, bias=True), Linear(inputs, size, bias=True)

    def forward(self, x_NI: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x_NI) + nn.functional.silu(self.linear(x_NI))
        return out


class HydraHeads(LayerHead):
    """The layer, run as pool layer ``layer`` over the target's states alone, and the heads."""

    def __init__(self, source: HydraSource, target: LlamaModel, layer: int, max_positions: int) -> None:
        own, vocab, size = target.config.layers[0], target.config.vocab_size, target.config.hidden_size
        config = DraftConfig(
            layer=replace(own, input_size=size, weights=PLAIN),
            rope=target.config.rope,
            target_hidden_size=size,
            target_vocab_size=vocab,
            draft_vocab_size=vocab,
            recycle_normed=True,
        )
        super().__init__(config, target.embed_tokens)
        self._add_layer(layer, max_positions)
        self.input_layernorm, self.norm = (RMSNorm(size, own.rms_norm_eps) for _ in range(2))
        count, self._repeats = source.heads, len(source.blocks) - 1
        self.first = nn.ModuleList(FirstBlock((i + 2) * size, size) for i in range(count))
        self.block = nn.ModuleList(
            ResidualBlock(size, bias=True) for _ in range(count if self._repeats else 0)
        )
        self.heads = nn.ModuleList(Linear(size, vocab, bias=True) for _ in range(count))

    def fuse(self, hidden_TH: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return hidden_TH

    def _inputs(
        self, tokens_N: Tensor, features_XH: Tensor, source_N: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        state_NH = features_XH if source_N is None else features_XH[source_N]
        return self.input_layernorm(state_NH), state_NH

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Return the target's embeddings of tokens ``[N, H]``."""
        out: Tensor = self._embed[0](tokens_N)
        return out

    def scores(self, level: int, path_NX: Tensor) -> Tensor:
        """Return the scores ``[N, V]`` after a path: the layer's state and the embeddings of root and path,
        concatenated."""
        x_NH = self.first[level](path_NX)
        for _ in range(self._repeats):
            x_NH = self.block[level](x_NH)
        out: Tensor = self.heads[level](x_NH)
        return out


def load_hydra(
    path: Path,
    target: LlamaModel,
    layer: int,
    max_positions: int,
    dtype: torch.dtype,
    overrides: Mapping[str, Any],
) -> tuple[HydraHeads, list[str]]:
    """Load heads for a target, and return them with notes on the choices made. Raises ValueError naming the file, the
    tensor and what is expected if they do not fit, and for any of ``overrides``, whose fields they do not have."""
    check_kind(overrides, "HYDRA")
    source = open_hydra(path)
    with building(dtype, target.device):
        heads = HydraHeads(source, target, layer, max_positions)
    load_parameters(heads, source.files, source.stored)
    source.check_rest(list(file_tensors(heads)))
    return heads, source.notes
