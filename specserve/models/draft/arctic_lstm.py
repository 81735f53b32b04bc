"""Snowflake's Arctic LSTM speculator: an MLP speculator whose state passes through the gates of an LSTM.

Tensors as Snowflake's trainer writes them: ``forget_proj.0.weight`` (of the target's state) and ``.1.weight`` (of its
own), likewise for ``input_proj``, ``output_proj`` and ``cell_proj``; ``forget_emb.0.weight``, which the other gates
share if ``tie_lstm_embs`` is true; ``cell_ln.0``, ``state_ln.0`` and ``head.0.weight``. Shared tensors are stored again
under each name. All levels but the first have the same weights.

Shapes: N nodes of a level, X rows of states, H the target's hidden size, I inner size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from specserve_kernels import rms_norm
from torch import Tensor, nn

from specserve.layers.linear import Linear
from specserve.models.base import TargetModel
from specserve.models.config import COUNT, TRUTH, check, read_json
from specserve.models.draft.load import DraftSource, Network
from specserve.models.draft.mlp_speculator import EPS, ShiftedNorm, at
from specserve.models.tensor_files import TensorFiles

GATES = ("forget", "input", "output", "cell")
_DIMS = ("inner_dim", "emb_dim", "proj_dim")


@dataclass(frozen=True, slots=True)
class ArcticSource(DraftSource):
    """A checkpoint of ``levels`` levels and ``inner`` channels. ``tied``: all gates share one embedding."""

    levels: int
    inner: int
    tied: bool
    scale_input: bool
    why_copied = ": tie_weights or tie_lstm_embs is true"

    def stored(self, name: str) -> str:
        kind, *rest = name.split(".")
        if kind == "emb":
            return f"{GATES[int(rest[0])]}_emb.0.weight"
        return f"{rest[0]}_proj.{rest[1]}.weight" if kind == "proj" else name

    @property
    def copies(self) -> Mapping[str, str]:
        copies = {f"head.{i}.weight": "head.0.weight" for i in range(1, self.levels)}
        if self.tied:
            copies |= {f"{gate}_emb.0.weight": "forget_emb.0.weight" for gate in GATES[1:]}
        return {name: first for name, first in copies.items() if name in self.files}


def open_arctic(path: Path) -> ArcticSource:
    """Read a directory. Raises ValueError naming the file, tensor or field if it holds no such speculator."""
    files, file = TensorFiles(path), path / "config.json"
    config = read_json(file)
    if config.get("method") != "sum_lstm":
        raise ValueError(
            f"{file}: method must be sum_lstm, found {config.get('method')!r}: for speculators without gates, with "
            "IBM's names, use --speculative-algorithm MLP_SPECULATOR"
        )
    first = "forget_proj.0.weight"
    if first not in files:
        raise ValueError(f"{path} holds no Arctic LSTM: expected {first}, found {files.contents}")
    check(config, file, COUNT, "n_predict")
    check(config, file, TRUTH, "tie_weights", "tie_lstm_embs", "scale_input", optional=True)
    if config.get("tie_weights") is not True:
        raise ValueError(f"{file}: tie_weights must be true for an LSTM, found {config.get('tie_weights')}")
    inner = files[first].shape[0]
    for name in _DIMS:
        if name in config and str(config[name]) != str(inner):
            raise ValueError(
                f"{file}: {name} must be {inner}, as in its tensors, found {config[name]!r}: projections of several "
                "layers are not supported"
            )
    tied, scale = config.get("tie_lstm_embs") is True, config.get("scale_input") is True
    note = f"draft of {config['n_predict']} levels of {inner} channels, an LSTM"
    return ArcticSource(files, config["n_predict"], inner, tied, scale, notes=[note])


class ArcticLSTM(Network):
    """Gates of ``proj(state) + w * embedding``. Rows hold the state, then the cell."""

    def __init__(self, source: ArcticSource, target: TargetModel) -> None:
        super().__init__()
        self.vocab_size, self._inner = target.config.vocab_size, source.inner
        self._scale_input = source.scale_input
        self.emb = nn.ModuleList(
            nn.Embedding(self.vocab_size, source.inner) for _ in range(1 if source.tied else len(GATES))
        )
        sizes = target.config.hidden_size, source.inner
        projections = [Linear(size, len(GATES) * source.inner, bias=False) for size in sizes]
        for i, each in enumerate(projections):
            each.parts = {f"{gate}.{i}": source.inner for gate in GATES}
        self.proj = nn.ModuleList(projections)
        self.cell_ln, self.state_ln = (nn.ModuleList([ShiftedNorm(source.inner)]) for _ in range(2))
        self.head = nn.ModuleList([Linear(source.inner, self.vocab_size, bias=False)])
        state_weight = 0.5 ** (0.5 / source.levels)
        self._embedding_weight = ((1 - state_weight**2) * source.inner / 2) ** 0.5 / state_weight

    def forward(self, level: int, tokens_N: Tensor, states_XH: Tensor, source_N: Tensor) -> Tensor:
        state_NH, cell_NI = states_XH[source_N], None
        if level:
            state_NH, cell_NI = state_NH.chunk(2, dim=1)
        elif self._scale_input:
            state_NH = rms_norm(state_NH, torch.ones_like(state_NH[0]), EPS) * 0.5**0.5
        embedded = [emb(tokens_N) for emb in self.emb] * (len(GATES) // len(self.emb))
        mixed = at(self.proj, level)(state_NH.contiguous()) + self._embedding_weight * torch.cat(
            embedded, dim=1
        )
        forget_NI, input_NI, output_NI, new_NI = mixed.chunk(len(GATES), dim=1)
        added_NI = input_NI.sigmoid() * nn.functional.gelu(self.cell_ln[0](new_NI.contiguous()))
        cell_NI = added_NI if cell_NI is None else forget_NI.sigmoid() * cell_NI + added_NI
        return torch.cat(
            [output_NI.sigmoid() * nn.functional.gelu(self.state_ln[0](cell_NI)), cell_NI], dim=1
        )

    def scores(self, level: int, states_NH: Tensor) -> Tensor:
        out: Tensor = self.head[0](states_NH[:, : self._inner].contiguous())
        return out
