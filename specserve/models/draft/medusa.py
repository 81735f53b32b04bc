"""Medusa: one head for each level, of residual blocks and an output head, all reading one state of the target.

Cai et al. 2024, arXiv 2401.10774. There are two published layouts. The original names ``0.0.linear.*`` (head, block)
and ``0.1.weight`` (the output head, after the blocks), in ``medusa_lm_head.pt`` or safetensors, alone or as
``medusa_head.*`` in the target's checkpoint; its "version 2" has no output heads. vLLM's has ``blocks.0.layers.0.*``
and ``lm_heads.0.weight``.

Shapes: B slots, L levels, H hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specserve.layers.linear import Linear
from specserve.layers.weights import Projection
from specserve.models.base import TargetModel
from specserve.models.config import COUNT, check, read_json
from specserve.models.draft.load import Borrowed, DraftModule, DraftSource
from specserve.models.tensor_files import TensorFiles


class MedusaNames(NamedTuple):
    """Names in a file: the ``j``-th block of head ``i``, the output head after ``blocks`` of them, and the config
    fields with the numbers of heads and blocks."""

    block: str
    scores: str
    fields: tuple[str, str]
    example: str

    def blocks(self, names: list[str], prefix: str) -> set[tuple[int, int]]:
        """Return head and number of each block among the tensors ``names``."""
        pattern = re.escape(prefix + self.block).replace(r"\{i\}", r"(\d+)").replace(r"\{j\}", r"(\d+)")
        found = (re.fullmatch(pattern + r"\.weight", name) for name in names)
        return {(int(match[1]), int(match[2])) for match in found if match}


LAYOUTS = (
    MedusaNames(
        "{i}.{j}.linear", "{i}.{blocks}", ("medusa_num_heads", "medusa_num_layers"), "0.0.linear.weight"
    ),
    MedusaNames(
        "blocks.{i}.layers.{j}",
        "lm_heads.{i}",
        ("num_heads", "num_hidden_layers"),
        "blocks.0.layers.0.weight",
    ),
)
_PREFIXES = ("", "medusa_head.", "medusa_heads.")
_MAP = "token_map"


@dataclass(frozen=True, slots=True)
class MedusaSource(DraftSource):
    """A checkpoint of ``levels`` heads with ``blocks`` each. ``scorers``: number of output heads; with 1 all share it,
    with 0 they use the target's."""

    layout: MedusaNames
    levels: int
    blocks: int
    scorers: int
    unread = (_MAP,)

    def stored(self, name: str) -> str:
        kind, i, *rest = name.split(".")
        if kind == "lm_heads":
            if self.scorers == 1 and (shared := f"{self.prefix}lm_head.weight") in self.files:
                return shared
            return f"{self.prefix}{self.layout.scores.format(i=i, blocks=self.blocks)}.{rest[-1]}"
        return f"{self.prefix}{self.layout.block.format(i=i, j=rest[0])}.{rest[-1]}"

    @property
    def bias(self) -> bool:
        return self.stored("heads.0.0.linear.bias") in self.files

    def rows(self, target_vocab: int) -> int:
        """Return the number of tokens that are scored."""
        return self.files[_MAP].numel() if self.scorers and _MAP in self.files else target_vocab

    def ids(self, target_vocab: int) -> Tensor | None:
        """Return the target ids of the rows, on the CPU; None: all of the target's. Raises ValueError naming the
        file."""
        if not self.scorers or _MAP not in self.files:
            return None
        ids = self.files[_MAP]
        whole = ids.dim() == 1 and not ids.dtype.is_floating_point and ids.dtype != torch.bool
        if (
            not whole
            or len(ids.unique()) < len(ids)
            or not 0 <= int(ids.min()) <= int(ids.max()) < target_vocab
        ):
            raise ValueError(
                f"{self.files.file(_MAP)}: tensor {_MAP} must list different token ids from 0 to {target_vocab - 1}, "
                f"found {ids.dtype} {list(ids.shape)}"
            )
        self.note(f"vocabulary: {len(ids)} tokens of the target's {target_vocab} ({_MAP})")
        return ids.long()


def open_medusa(path: Path) -> MedusaSource:
    """Read a directory. Raises ValueError naming the file, tensor or field if it holds no such heads."""
    files, config_file = TensorFiles(path), path / "config.json"
    config, names = read_json(config_file), files.names()
    for layout in LAYOUTS:
        for prefix in _PREFIXES:
            if found := layout.blocks(names, prefix):
                return _source(path, files, layout, prefix, found, config)
    expected = " or ".join(layout.example for layout in LAYOUTS)
    raise ValueError(
        f"{path} holds no Medusa heads: expected tensors like {expected}, found {files.contents}"
    )


def _source(
    path: Path,
    files: TensorFiles,
    layout: MedusaNames,
    prefix: str,
    found: set[tuple[int, int]],
    config: dict[str, Any],
) -> MedusaSource:
    heads, blocks = (1 + max(column) for column in zip(*found, strict=True))
    scored = [prefix + layout.scores.format(i=i, blocks=blocks) + ".weight" in files for i in range(heads)]
    scorers = heads if any(scored) else 0
    if config.get("original_lm_head") is True:
        scorers = 1 if scored[0] or f"{prefix}lm_head.weight" in files else 0
    source = MedusaSource(files, layout, heads, blocks, scorers, prefix=prefix)
    whose = {0: "the target's head (its files have no scores)", 1: "one head for all"}
    score = whose.get(scorers, "their own output heads")
    source.note(f"of {heads} heads of {blocks} blocks, which score by {score}")
    for name, counted in zip(layout.fields, (heads, blocks), strict=True):
        check(config, path / "config.json", COUNT, name, optional=True)
        if config.get(name) not in (None, counted):
            source.note(f"{name} is {config[name]} in its config; its tensors say {counted}")
    if base := config.get("base_model_name_or_path"):
        source.note(f"made for {base} (base_model_name_or_path)")
    if "medusa_choices" in config:
        source.note("medusa_choices is not used: each step's trees are selected by the candidates' scores")
    return source


class ResidualBlock(nn.Module):
    """``x + SiLU(linear(x))``."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = Linear(size, size, bias=bias)

    def forward(self, x_BH: Tensor) -> Tensor:
        return x_BH + nn.functional.silu(self.linear(x_BH))


class MedusaHeads(DraftModule):
    """``lm_heads``: one for each head, one for all, or none. Without any the target's is used."""

    def __init__(
        self, target: TargetModel, heads: int, blocks: int, *, bias: bool, scorers: int, rows: int
    ) -> None:
        super().__init__()
        size, self.vocab_size = target.config.hidden_size, rows
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size, bias) for _ in range(blocks))) for _ in range(heads)
        )
        self.lm_heads = nn.ModuleList(Linear(size, rows, bias=False) for _ in range(scorers))
        self._target_head = Borrowed(target.lm_head)

    def forward(self, hidden_BH: Tensor, levels: int) -> Tensor:
        """Return the logits of the first ``levels`` heads ``[L, B, Vd]``. Head 0 predicts the token after the one that
        the target chose from ``hidden_BH``, head 1 the next, and so on."""
        logits_LBV = hidden_BH.new_empty(levels, len(hidden_BH), self.vocab_size)
        for level in range(levels):
            self.scores(level, hidden_BH, out=logits_LBV[level])
        return logits_LBV

    def scores(self, level: int, hidden_NH: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of one head ``[N, Vd]``, written to ``out`` if given."""
        found: Tensor = self._scorer(level)(self.heads[level](hidden_NH), out=out)
        return found

    def _scorer(self, level: int) -> Projection:
        if not len(self.lm_heads):
            return self._target_head.module
        scorer = self.lm_heads[min(level, len(self.lm_heads) - 1)]
        assert isinstance(scorer, Projection)
        return scorer


def heads_of(source: MedusaSource, target: TargetModel) -> MedusaHeads:
    """Return the heads of a checkpoint."""
    sizes, rows = (source.levels, source.blocks), source.rows(target.config.vocab_size)
    return MedusaHeads(target, *sizes, bias=source.bias, scorers=source.scorers, rows=rows)
