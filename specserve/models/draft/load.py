"""Load a draft's checkpoint, of any kind: build the module, fill it, note what was chosen, quantize and pack it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from specserve.layers.decoder import DecoderLayer
from specserve.layers.linear import pack_linears, quantize_linears
from specserve.layers.ranks import ONE
from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.checkpoint import building, load_parameters, unread_ends
from specserve.models.draft.vocabulary import VocabMap
from specserve.models.tensor_files import TensorFiles

log = logging.getLogger(__name__)

EXCHANGE = 23_000_000
"""How many bytes an H200 reads in the 5.4 microseconds in which two exchange a few."""


class DraftModule(nn.Module):
    """A draft's modules. What it uses of the target is ``Borrowed``."""

    vocab_size: int  # tokens that it scores

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def unquantized(self) -> Collection[str]:
        """Names of projections that are not quantized."""
        return ()


class Network(DraftModule):
    """Scores the tokens of any level from states along the path."""

    def forward(self, level: int, tokens_N: Tensor, states_XH: Tensor, source_N: Tensor) -> Tensor:
        """Return the states after a level's tokens. ``states_XH``: for level 0 the target's after its final norm,
        otherwise the previous level's result; ``source_N``: each token's row there."""
        raise NotImplementedError

    def scores(self, level: int, states_NH: Tensor) -> Tensor:
        """Return the scores ``[N, V]`` of the tokens after the level's tokens."""
        raise NotImplementedError


M = TypeVar("M", bound=nn.Module)
D = TypeVar("D", bound=DraftModule)


class Borrowed(NamedTuple, Generic[M]):
    """Another model's module: in a tuple, it is not registered as a part of the module that uses it."""

    module: M


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft's checkpoint. ``prefix``: what the names of its tensors begin with; others are the target's. ``notes``:
    the choices made while reading it, and their reasons."""

    files: TensorFiles
    prefix: str = field(default="", kw_only=True)
    notes: list[str] = field(default_factory=list, kw_only=True)
    unread: ClassVar[tuple[str, ...]] = ()  # tensors for which there is no parameter
    why_copied: ClassVar[str] = ""

    @property
    def config_file(self) -> Path:
        return self.files.path / "config.json"

    def stored(self, name: str) -> str:
        """Return the file's name of a parameter."""
        return self.prefix + name

    @property
    def copies(self) -> Mapping[str, str]:
        """Tensors that a file stores again although they are shared, and those that they equal."""
        return {}

    def note(self, text: str) -> None:
        """Add a note, unless it is there already."""
        if (note := f"draft {text}") not in self.notes:
            self.notes.append(note)

    def note_unread(self, parameters: Iterable[str], ends: tuple[str, ...]) -> None:
        """Note tensors that no parameter reads, unless their names have one of these ends. Raises ValueError if copies
        differ."""
        for name, first in self.copies.items():
            if not torch.equal(self.files[name], self.files[first]):
                raise ValueError(
                    f"{self.files.file(name)}: tensor {name} differs from {first}, expected the same{self.why_copied}"
                )
        unread = [name for name in self.files.names() if name.endswith(("rotary_emb.inv_freq", *ends))]
        known = {*self.unread, *unread, *self.copies, *map(self.stored, parameters)}
        self.files.note_unread(known, self.notes, self.prefix)


S = TypeVar("S", bound=DraftSource)
C = TypeVar("C", bound=Any)


def shared_out(
    config: C, layer_class: type[DecoderLayer], draft: DraftSettings, target: TargetModel, source: DraftSource
) -> C:
    """Return a rank's part of a configuration: of its ``layer``, and of an own output head, which its ``ranks`` share
    out, unless these take longer to add the layer's parts, or to gather the head's, than to read all of it, or its
    sizes can't be shared out."""
    ranks, layer = target.config.ranks, config.layer
    if ranks.count == 1:
        return config
    itemsize = 1 if draft.quantization != "none" else target.dtype.itemsize

    def pays(weights: int, exchanges: int) -> bool:
        return weights * itemsize * (ranks.count - 1) > exchanges * EXCHANGE * ranks.count

    if layer.ranks.count == 1:  # not the target's
        with torch.device("meta"), suppress(ValueError):
            weights = sum(each.numel() for each in layer_class(layer, 0).parameters())
            layer = layer.on(ranks) if pays(weights, exchanges=2) else layer
    source.note(f"layers: {'shared out' if layer.ranks.count > 1 else 'whole on each rank'}")
    head = pays(config.draft_vocab_size * layer.hidden_size, exchanges=1)
    return replace(config, layer=layer, ranks=ranks if head else ONE)


@dataclass(frozen=True, slots=True)
class LoadedDraft(Generic[D]):
    """``vocab``: the tokens that it scores; None: the target's."""

    module: D
    vocab: VocabMap | None
    notes: list[str]


def load_draft(
    draft: DraftSettings,
    target: TargetModel,
    source: S,
    make: Callable[[S, TargetModel], D],
    ids: Tensor | None = None,
    prepare: Callable[[D], None] | None = None,
) -> LoadedDraft[D]:
    """Make the module of a checkpoint, load it and log the choices made. ``ids``: the target ids of its vocabulary,
    None: all. ``prepare`` is called with the module before it is quantized.

    Raises ValueError naming the file, the tensor and what is expected if it does not fit the target.
    """
    with building(target.dtype, target.device):
        module = make(source, target)
    parameters = load_parameters(module, source.files, source.stored)
    source.note_unread(parameters, unread_ends(target.config))
    for note in source.notes:
        log.info("%s", note)
    if prepare is not None:
        prepare(module)
    quantize_linears(module, draft.quantization, module.unquantized)
    pack_linears(module, keep=["qkv_proj"])  # ``project_kv`` reads rows of these
    vocab = None if ids is None else VocabMap.of(ids.to(target.device), target.config.vocab_size)
    return LoadedDraft(module, vocab, source.notes)


def read_ids(source: DraftSource, rows: int, vocab: int) -> Tensor | None:
    """Return the target ids of a draft vocabulary from the offsets ``d2t``, checked against ``t2d`` if the file has it;
    None if it is the target's whole vocabulary."""
    files = source.files
    if "d2t" not in files:
        if rows != vocab:
            needs = f"a draft vocabulary of {rows} tokens needs it, int64 [{rows}]"
            raise ValueError(f"{files.path}: tensor d2t is missing; {needs}")
        source.note(f"vocabulary: all {vocab} tokens of the target (no d2t)")
        return None
    offsets, file = files["d2t"], files.file("d2t")
    if offsets.shape != (rows,) or offsets.dtype not in (torch.int64, torch.int32):
        found = f"{offsets.dtype} {list(offsets.shape)}"
        raise ValueError(f"{file}: tensor d2t is {found}, expected int64 [{rows}]")
    ids = offsets.long() + torch.arange(rows)
    if bool((ids.diff() <= 0).any()) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        wanted = f"strictly increasing target ids from 0 to {vocab - 1}"
        raise ValueError(f"{file}: tensor d2t must give {wanted}")
    if rows < vocab and "t2d" in files:  # otherwise t2d is unused, and all false in EAGLE's own files
        kept = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        if not torch.equal(files["t2d"].bool()[:vocab], kept):
            file = files.file("t2d")
            raise ValueError(f"{file}: tensor t2d does not mark the target ids that d2t gives")
    source.note(f"vocabulary: {rows} tokens of the target's {vocab} (d2t)")
    return None if rows == vocab else ids
