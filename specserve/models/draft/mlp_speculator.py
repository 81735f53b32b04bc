"""IBM's MLP speculator: a recurrent state with one layer for each level, over one target state and the drafted tokens.

Wertheimer et al. 2024, arXiv 2404.19124. Tensors as the "accelerators" publish them: ``speculator.`` and ``emb``,
``proj``, ``ln`` or ``head`` with the level's number, or without that prefix. With ``tie_weights`` all levels share
embedding, norm and head, and all but the first a projection; a file may store shared tensors once, or once a level.

Shapes: N nodes of a level, X rows of states, H the target's hidden size, I inner size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from specserve_kernels import rms_norm
from torch import Tensor, nn

from specserve.layers.linear import Linear
from specserve.layers.norms import RMSNorm
from specserve.models.base import TargetModel
from specserve.models.config import COUNT, TRUTH, check, read_json
from specserve.models.draft.load import DraftSource, Network
from specserve.models.tensor_files import TensorFiles

EPS = 1e-6  # epsilon of its norms in all published configurations
_PREFIXES = ("speculator.", "")
_TENSOR = re.compile(r"(emb|proj|head|ln)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class SpeculatorConfig:
    """``levels`` levels of ``inner`` channels."""

    levels: int
    inner: int
    tied: bool
    scale_input: bool

    def count(self, kind: str) -> int:
        """Return the number of different modules of a kind: emb, proj, ln or head."""
        shared = 2 if kind == "proj" else 1
        return min(self.levels, shared) if self.tied else self.levels


@dataclass(frozen=True, slots=True)
class SpeculatorSource(DraftSource):
    """A checkpoint. ``before``: what the names of all its tensors begin with."""

    before: str
    config: SpeculatorConfig
    why_copied = ": tie_weights is true"

    @property
    def levels(self) -> int:
        return self.config.levels

    def stored(self, name: str) -> str:
        return self.before + name

    @property
    def copies(self) -> Mapping[str, str]:
        """A tied module's number in a file may be any level's."""
        matches = [_TENSOR.fullmatch(name.removeprefix(self.before)) for name in self.files.names()]
        levels = {
            match[0]: (match[1], int(match[2]), match[3]) for match in matches if match and self.config.tied
        }
        return {
            self.stored(name): self.stored(f"{kind}.{self.config.count(kind) - 1}.{part}")
            for name, (kind, level, part) in levels.items()
            if self.config.count(kind) <= level < self.config.levels
        }


def open_speculator(path: Path) -> SpeculatorSource:
    """Read a directory. Raises ValueError naming the file, tensor or field if it holds no such speculator."""
    files, file = TensorFiles(path), path / "config.json"
    config, names = read_json(file), files.names()
    prefix = next(
        (p for p in _PREFIXES if f"{p}proj.0.weight" in files and f"{p}emb.0.weight" in files), None
    )
    if prefix is None:
        raise ValueError(
            f"{path} holds no MLP speculator: expected speculator.proj.0.weight and speculator.emb.0.weight, "
            f"found {files.contents}"
        )
    check(config, file, COUNT, "n_predict", "emb_dim", optional=True)
    check(config, file, TRUTH, "tie_weights", "scale_input", optional=True)
    tied, scale = config.get("tie_weights") is True, config.get("scale_input") is True
    heads = 1 + max(_heads(names, prefix), default=-1)
    levels = config.get("n_predict")
    if levels is None or (heads != levels and not (tied and heads == 1)):
        words = (
            f"n_predict must be {heads}, the number of heads in its files"
            if heads
            else "its files have no head"
        )
        raise ValueError(f"{file}: {words}, found {levels}: embeddings are weighted by it")
    found = SpeculatorConfig(levels, files[f"{prefix}proj.0.weight"].shape[0], tied, scale)
    source = SpeculatorSource(files, prefix, found)
    _note(source, config)
    return source


def _heads(names: list[str], prefix: str) -> list[int]:
    found = (_TENSOR.fullmatch(name.removeprefix(prefix)) for name in names)
    return [int(match[2]) for match in found if match and match[1] == "head"]


def _note(source: SpeculatorSource, config: dict[str, Any]) -> None:
    read = source.config
    shared = ", which share their weights" if read.tied else ""
    scaled = "; its input is normed" if read.scale_input else ""
    source.note(f"of {read.levels} levels of {read.inner} channels{shared}{scaled}")
    if config.get("inner_dim") not in (None, 0, read.inner):
        source.note(f"inner_dim is {config['inner_dim']!r} in its config; its tensors say {read.inner}")
    if "top_k_tokens_per_head" in config:
        source.note(
            "top_k_tokens_per_head is not used: each step's trees are selected by the candidates' scores"
        )


class ShiftedNorm(RMSNorm):
    """A root-mean-square norm with a learned scale and shift."""

    def __init__(self, size: int) -> None:
        super().__init__(size, EPS)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x_NI: Tensor) -> Tensor:
        return super().forward(x_NI) + self.bias


class MLPSpeculator(Network):
    """``state = GELU(norm(proj(state) + w * embedding))``; a head turns each level's state into scores."""

    def __init__(self, config: SpeculatorConfig, target: TargetModel) -> None:
        super().__init__()
        hidden, self.vocab_size, inner = target.config.hidden_size, target.config.vocab_size, config.inner
        self.config = config
        self.emb = nn.ModuleList(nn.Embedding(self.vocab_size, inner) for _ in range(config.count("emb")))
        self.proj = nn.ModuleList(
            Linear(inner if i else hidden, inner, bias=False) for i in range(config.count("proj"))
        )
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(config.count("ln")))
        self.head = nn.ModuleList(
            Linear(inner, self.vocab_size, bias=False) for _ in range(config.count("head"))
        )
        state_weight = 0.5 ** (0.5 / config.levels)
        self._embedding_weight = ((1 - state_weight**2) * inner / 2) ** 0.5 / state_weight
        self._scale_input = config.scale_input

    def forward(self, level: int, tokens_N: Tensor, states_XH: Tensor, source_N: Tensor) -> Tensor:
        proj, emb, norm = (at(each, level) for each in (self.proj, self.emb, self.ln))
        states_NH = states_XH[source_N]
        if level == 0 and self._scale_input:
            states_NH = rms_norm(states_NH, torch.ones_like(states_NH[0]), EPS) * 0.5**0.5
        mixed_NI = proj(states_NH) + self._embedding_weight * emb(tokens_N)
        return nn.functional.gelu(norm(mixed_NI))

    def scores(self, level: int, states_NH: Tensor) -> Tensor:
        out: Tensor = at(self.head, level)(states_NH)
        return out


def at(modules: nn.ModuleList, level: int) -> nn.Module:
    """Return the level's own module, or the one that the last levels share."""
    return modules[min(level, len(modules) - 1)]
