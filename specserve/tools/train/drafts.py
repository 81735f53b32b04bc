"""The drafts that ``--algorithm`` trains, one record each; no other module of this tool knows their names."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from specserve.models.base import TargetModel
from specserve.tools.train.block import block_files, block_trainer
from specserve.tools.train.eagle import eagle3_files, eagle3_trainer, eagle_files, eagle_trainer
from specserve.tools.train.export import Files
from specserve.tools.train.last_state import (
    medusa_files,
    medusa_trainer,
    mlp_speculator_files,
    mlp_speculator_trainer,
)
from specserve.tools.train.packing import Documents
from specserve.tools.train.trainer import Trainer


class Option(NamedTuple):
    """An option that determines the draft. ``sizes``: the time of a step depends on it most. ``arguments``: of
    ``add_argument``."""

    name: str
    sizes: bool
    arguments: dict[str, Any]

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


class Draft(NamedTuple):
    """A kind of draft that can be trained.

    ``options``: those that it takes. ``trainer``: returns the trainer of a fresh draft, on the target's device, for the
    command's arguments and training data. ``files``: returns what is written of a trained one.
    """

    name: str
    options: Sequence[Option]
    trainer: Callable[[Namespace, TargetModel, Sequence[Documents]], Trainer[Any]]
    files: Callable[[Any, Namespace], Files]


OPTIONS: list[Option] = []
"""In the order of the help text."""


def _option(name: str, kind: Callable[[str], Any], help: str, *, sizes: bool = False, **more: Any) -> Option:
    OPTIONS.append(Option(name, sizes, {"type": kind, "help": help, **more}))
    return OPTIONS[-1]


def positive(text: str) -> int:
    """Parse an integer above 0."""
    value = int(text)
    if value <= 0:
        raise ArgumentTypeError(f"must be above 0, found {value}")
    return value


_TTT_LENGTH = _option(
    "ttt_length", positive, "EAGLE: levels trained (default: EAGLE3 7, EAGLE 3)", sizes=True
)
_DECAY = _option("ttt_decay", float, "weight of a level relative to the previous one", default=0.8)
_VOCABULARY = _option(
    "draft_vocab_size", positive, "EAGLE3 (default: 32000, at most the target's)", sizes=True
)
_LAYERS = (
    _option("draft_intermediate_size", positive, "default: the target's"),
    _option("draft_num_heads", positive, "default: the target's"),
    _option("draft_num_kv_heads", positive, "default: the target's"),
    _option("rope_theta", float, "default: the target's, without its scaling"),
)
_TAPS = _option(
    "aux_layers",
    int,
    "boundaries; k is the input of layer k (default: EAGLE3 2 N/2 N-3, blocks five from 2 to N-2)",
    nargs="+",
)
_FEATURES = _option("feature_weight", float, "EAGLE: weight of the feature loss", default=1.0)
_ENTROPY = _option("ce_weight", float, "EAGLE, DSPARK: weight of the cross-entropy", default=0.1)
_BLOCKS = (
    _option("draft_layers", positive, "DFLASH, DSPARK: layers of the draft", sizes=True, default=5),
    _option("block_size", positive, "tokens of a block (default: DFLASH 16, DSPARK 7)"),
    _option("anchors", positive, "blocks trained per row (default: an eighth of its tokens)", sizes=True),
    _option("mask_token", int, "DFLASH, DSPARK: token id (default: the last one unused by the data)"),
)
_KINDS = ("vanilla", "gated", "rnn")
_MARKOV = (
    _option("markov_rank", positive, "DSPARK: rank of the Markov head", default=256),
    _option("markov_head", str, "DSPARK: kind of Markov head", choices=_KINDS, default="vanilla"),
)
_MEDUSA = (
    _option("medusa_heads", positive, "MEDUSA: tokens that it drafts", sizes=True, default=5),
    _option("medusa_layers", positive, "MEDUSA: residual blocks per head", default=1),
    _option(
        "medusa_scores",
        str,
        "MEDUSA: a copy of the target's head for each head, or the target's own for all (far smaller files)",
        choices=("own", "target"),
        default="own",
    ),
)
_MLP = (
    _option("mlp_levels", positive, "MLP_SPECULATOR: tokens that it drafts", sizes=True, default=4),
    _option("mlp_inner", positive, "MLP_SPECULATOR: channels (default: the target's)"),
)
_DFLASH = partial(block_trainer, size=16, markov=False)
_DSPARK = partial(block_trainer, size=7, markov=True)
_ALL = (
    Draft("EAGLE", (_TTT_LENGTH, _DECAY, *_LAYERS, _FEATURES, _ENTROPY), eagle_trainer, eagle_files),
    Draft("EAGLE3", (_TTT_LENGTH, _DECAY, _VOCABULARY, *_LAYERS, _TAPS), eagle3_trainer, eagle3_files),
    Draft("DFLASH", (_DECAY, *_LAYERS, _TAPS, *_BLOCKS), _DFLASH, block_files),
    Draft("DSPARK", (_DECAY, *_LAYERS, _TAPS, _ENTROPY, *_BLOCKS, *_MARKOV), _DSPARK, block_files),
    Draft("MEDUSA", (_DECAY, *_MEDUSA), medusa_trainer, medusa_files),
    Draft("MLP_SPECULATOR", (_DECAY, *_MLP), mlp_speculator_trainer, mlp_speculator_files),
)
DRAFTS = {draft.name: draft for draft in _ALL}
