"""Apple's ReDrafter: a recurrent state over the tokens of a path, and a head that reads it next to one target state.

Zhang et al. 2024, arXiv 2403.09919. Tensors as Apple's trainer writes them: ``rnn_w`` and ``rnn_u`` (without them the
state is the sum of the tokens' embeddings), ``input_proj`` if the head is not twice as wide as the target, residual
blocks ``lm_head.0.linear`` and so on, and the scores in the ``lm_head`` after the last of them. TensorRT-LLM's export
has the same under ``drafter.layers.0.linear`` and ``drafter.lm_head``. All levels have the same weights.

Shapes: N nodes of a level, X rows of states, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specserve.layers.linear import Linear
from specserve.models.base import TargetModel
from specserve.models.config import read_json
from specserve.models.draft.fields import check_same
from specserve.models.draft.load import Borrowed, DraftSource, Network
from specserve.models.draft.medusa import ResidualBlock
from specserve.models.tensor_files import TensorFiles


class ReDrafterNames(NamedTuple):
    """Names in a file: a block, the scores after ``blocks`` of them, what they begin with; and the config fields with
    the number of blocks, their width, and whether there is a recurrent network."""

    prefix: str
    block: str
    scores: str
    fields: tuple[str, str, str]


APPLE = ReDrafterNames("", "lm_head.{}.linear", "lm_head.{}", ("num_draft_layers", "exit_dim", "rnn"))
TENSORRT = ReDrafterNames(
    "drafter.",
    "layers.{}.linear",
    "lm_head",
    ("redrafter_num_layers", "redrafter_exit_dim", "redrafter_is_rnn"),
)


@dataclass(frozen=True, slots=True)
class ReDrafterSource(DraftSource):
    """A checkpoint with ``blocks`` residual blocks of ``width`` channels."""

    layout: ReDrafterNames
    blocks: int

    def stored(self, name: str) -> str:
        kind, *rest = name.split(".")
        if kind == "blocks":
            name = f"{self.layout.block.format(rest[0])}.{rest[-1]}"
        elif kind == "lm_head":
            name = f"{self.layout.scores.format(self.blocks)}.weight"
        return self.prefix + name

    @property
    def width(self) -> int:
        return self.files[self.stored("lm_head.weight")].shape[-1]

    @property
    def rnn(self) -> bool:
        return self.stored("rnn_w.weight") in self.files


def open_redrafter(path: Path) -> ReDrafterSource:
    """Read a directory. Raises ValueError naming the file, tensor or field if it holds no such drafter."""
    files, file = TensorFiles(path), path / "config.json"
    config, found = read_json(file), [_source(files, layout) for layout in (APPLE, TENSORRT)]
    source = next((each for each in found if each.stored("lm_head.weight") in files), None)
    if source is None:
        expected = " or ".join(each.stored("lm_head.weight") for each in found)
        raise ValueError(f"{path} holds no ReDrafter: expected {expected}, found {files.contents}")
    check_same(
        config, file, zip(source.layout.fields, (source.blocks, source.width, source.rnn), strict=True)
    )
    state = "a recurrent network" if source.rnn else "the sum of the embeddings"
    source.note(f"of {source.blocks} blocks of {source.width} channels after {state}")
    if source.layout is TENSORRT:
        source.note(
            "redrafter_num_beams is not used: each step's trees are selected by the candidates' scores; its "
            "first level adds rnn_u.bias, as in training (TensorRT-LLM leaves it out)"
        )
    return source


def _source(files: TensorFiles, layout: ReDrafterNames) -> ReDrafterSource:
    name = layout.prefix + layout.block + ".weight"
    blocks = next(j for j in count() if name.format(j) not in files)
    return ReDrafterSource(files, layout, blocks, prefix=layout.prefix)


class ReDrafter(Network):
    """``state = SiLU(rnn_w(embedding) + rnn_u(state))``, or ``embedding + state``. A row is the target's state, then
    this one."""

    def __init__(self, source: ReDrafterSource, target: TargetModel) -> None:
        super().__init__()
        size, self.vocab_size = target.config.hidden_size, target.config.vocab_size
        width, self._rnn = source.width, source.rnn
        self._embed = Borrowed(target.embed_tokens)
        if self._rnn:
            self.rnn_w, self.rnn_u = Linear(size, size, bias=False), Linear(size, size, bias=True)
        self.input_proj = nn.Identity() if width == 2 * size else Linear(2 * size, width, bias=True)
        self.blocks = nn.Sequential(*(ResidualBlock(width, bias=True) for _ in range(source.blocks)))
        self.lm_head = Linear(width, self.vocab_size, bias=False)

    def forward(self, level: int, tokens_N: Tensor, states_XH: Tensor, source_N: Tensor) -> Tensor:
        target_NH, state_NH = states_XH[source_N], self._embed.module(tokens_N)
        before_NH = torch.zeros_like(target_NH)
        if level:
            target_NH, before_NH = target_NH.chunk(2, dim=1)
        if self._rnn:
            state_NH = nn.functional.silu(self.rnn_w(state_NH) + self.rnn_u(before_NH.contiguous()))
        else:
            state_NH = state_NH + before_NH
        return torch.cat([target_NH, state_NH], dim=1)

    def scores(self, level: int, states_NH: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.blocks(self.input_proj(states_NH)))
        return out
