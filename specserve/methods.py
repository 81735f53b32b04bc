"""The drafting methods that ``--speculative-algorithm`` selects, one record each; no other module knows their names.

Imports no torch, because settings, tools and documentation read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

NONE = "NONE"  # plain decoding
JOIN = "+"  # between the names of two methods that draft into one tree

MOST_COPIED = 16  # levels of copied text next to a model's drafts; deeper ones are rarely right in one step

Copies = Literal["none", "all", "some"]
"""Which drafts of a method are copied from a text: chains of any length that branch only at the root."""


class Lookahead(NamedTuple):
    """Sizes of lookahead decoding: columns of its window, tokens of an n-gram, and n-grams verified in a step."""

    window: int
    ngram: int
    guesses: int

    @property
    def generations(self) -> int:
        """Rows of the window, and tokens that an n-gram adds to the one it begins with."""
        return self.ngram - 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, topk and tokens of the tree: deepest node, most candidates of one, all with the root."""
        deepest = self.generations + max(self.window - 2, 0)
        return deepest, min(self.guesses + 2, 64), self.generations * (self.window + self.guesses)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Limits of a method with its checkpoint. ``most_levels``: maximum number of draft levels, None: any. ``block``:
    positions that a block drafter's single pass writes per slot, 0: levels are drafted one by one. ``lookahead``: its
    sizes, which leave one shape to choose."""

    copies: Copies = "none"
    most_levels: int | None = None
    block: int = 0
    lookahead: Lookahead | None = None


ANY = Drafts()
"""No limits."""


@dataclass(frozen=True, slots=True)
class Method:
    """A drafting method, as far as it is known before its drafter is loaded.

    ``load``: the function that makes the drafter, or its ``module:name``; see ``speculation.drafters``. ``heads``: the
    kinds of draft head that it runs, empty: it has no checkpoint. ``bundled``: the folder of the bundled model's draft.
    ``map_refusal``: why it takes no ``--speculative-token-map`` file, None: it takes one. ``dynamic_map``: it takes a
    dynamic token map. ``fixed_shape``: steps, topk and tokens, if the name implies them. ``looks_ahead``: the sizes of
    ``Lookahead`` do. ``copies``: which drafts are copied from a text. ``recalls``: earlier answers are among these
    texts. ``reads_datastore``: a datastore file is.
    ``count_levels``: returns the maximum number of draft levels of a checkpoint's directory, None: any number.
    ``block_size``: returns ``Drafts.block`` of such a directory.
    """

    name: str
    load: str | Callable[..., Any]
    aliases: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    bundled: str | None = None
    map_refusal: str | None = "its drafts don't come from the target's head"
    dynamic_map: bool = False
    fixed_shape: tuple[int, int, int] | None = None
    looks_ahead: bool = False
    copies: Copies = "none"
    recalls: bool = False
    reads_datastore: bool = False
    count_levels: str | Callable[[Path], int] | None = None
    block_size: str | Callable[[Path], int] | None = None

    @property
    def needs_draft(self) -> bool:
        """Return whether it runs a checkpoint."""
        return bool(self.heads)

    @property
    def has_one_shape(self) -> bool:
        """Return whether the settings of the shape choose nothing."""
        return self.looks_ahead or self.fixed_shape is not None

    def drafts(self, draft: Path) -> Drafts:
        """Return the limits with a checkpoint. Raises ValueError if it can't be read."""
        levels = None if self.count_levels is None else named(self.count_levels)(draft)
        return Drafts(self.copies, levels, named(self.block_size)(draft) if self.block_size else 0)


def named(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that ``module:name`` names; a function is returned as it is."""
    if not isinstance(function, str):
        return function
    module, _, path_in_it = function.partition(":")
    found: Callable[..., Any] = attrgetter(path_in_it)(import_module(module))
    return found


METHOD_NAMES = [NONE]
"""Accepted values of the setting, in order; ``register`` extends it."""
METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Make a method selectable by its name and aliases."""
    for name in (method.name, *method.aliases):
        assert name not in METHOD_NAMES, f"two methods are called {name}"
        METHODS[name] = method
        METHOD_NAMES.append(name)


def method_of(name: str) -> Method | None:
    """Return the method of a name or an alias, None for plain decoding."""
    return None if name == NONE else METHODS[name]


OWN_HEADS = {"MTP": ("MiMoForCausalLM", "num_nextn_predict_layers")}
"""Kinds of draft head that a target's checkpoint may contain: the target's architecture, and the field that counts
them."""


def carries_draft(algorithm: str, model_path: Path) -> bool:
    """Return whether the model's own checkpoint contains the head that the algorithm runs, so that no draft is
    needed."""
    method = method_of(algorithm)
    own = [OWN_HEADS[kind] for kind in (method.heads if method else ()) if kind in OWN_HEADS]
    try:
        config = json.loads((model_path / "config.json").read_text())
        return any(name in config["architectures"] and config.get(count) != 0 for name, count in own)
    except (OSError, ValueError, LookupError, TypeError):  # loading the model reports the error
        return False


def parts_of(name: str) -> list[str]:
    """Return the names of the methods that a merged one joins."""
    return name.split(JOIN)


def names_where(wanted: Callable[[Method], bool]) -> list[str]:
    """Return the names and aliases of the methods that ``wanted`` accepts."""
    return [name for name in METHOD_NAMES if (method := method_of(name)) is not None and wanted(method)]


def names_like(name: str, wanted: Callable[[Method], bool]) -> list[str]:
    """Return those of ``names_where`` that are joined with the same method as ``name``, or with none as ``name`` is."""
    return [each for each in names_where(wanted) if parts_of(each)[1:] == parts_of(name)[1:]]


_EAGLE = "specserve.speculation.drafters.eagle:EagleDrafter.load"
_OWN_VOCABULARY = (
    "its heads have a trained draft vocabulary, from which --speculative-token-map dynamic chooses"
)
_FIXED_VOCABULARY = "its heads were trained for the tokens that they score"
_EAGLE_HEAD = Method(
    "EAGLE", _EAGLE, heads=("EAGLE", "MTP"), bundled="eagle", map_refusal=None, dynamic_map=True
)
register(_EAGLE_HEAD)
register(
    replace(_EAGLE_HEAD, name="EAGLE3", heads=("EAGLE3",), bundled="eagle3", map_refusal=_OWN_VOCABULARY)
)
register(replace(_EAGLE_HEAD, name="NEXTN", aliases=("MTP",), heads=("MTP",), bundled=None))
register(
    Method(
        "MEDUSA",
        "specserve.speculation.drafters.medusa:MedusaDrafter.load",
        heads=("MEDUSA",),
        bundled="medusa",
        map_refusal=_FIXED_VOCABULARY,
        count_levels="specserve.models.draft.medusa:count_heads",
    )
)
register(
    Method(
        "MLP_SPECULATOR",
        "specserve.speculation.drafters.recurrent:load_mlp_speculator",
        heads=("MLP_SPECULATOR",),
        bundled="mlp_speculator",
        map_refusal=_FIXED_VOCABULARY,
        count_levels="specserve.models.draft.mlp_speculator:count_levels",
    )
)
_BLOCKS = "specserve.models.draft.block_source"
_BLOCK_DRAFT = Method(
    "DFLASH",
    "specserve.speculation.drafters.block:BlockDrafter.load",
    heads=("DFLASH",),
    map_refusal="it scores with the target's whole head or with rows that it was trained with",
    count_levels=f"{_BLOCKS}:count_levels",
    block_size=f"{_BLOCKS}:block_size",
)
register(_BLOCK_DRAFT)
register(replace(_BLOCK_DRAFT, name="DSPARK", heads=("DSPARK",), bundled="dspark"))
register(replace(_BLOCK_DRAFT, name="DOMINO", heads=("DOMINO",)))
register(replace(_BLOCK_DRAFT, name="DFLASH2", heads=("DFLASH2",)))
register(
    Method(
        "HYDRA",
        "specserve.speculation.drafters.hydra:load_hydra",
        heads=("HYDRA",),
        map_refusal=_FIXED_VOCABULARY,
        count_levels="specserve.models.draft.hydra:count_heads",
    )
)
register(
    Method(
        "ARCTIC_LSTM",
        "specserve.speculation.drafters.recurrent:load_arctic_lstm",
        heads=("ARCTIC_LSTM",),
        map_refusal=_FIXED_VOCABULARY,
        count_levels="specserve.models.draft.arctic_lstm:count_levels",
    )
)
register(
    Method(
        "REDRAFTER",
        "specserve.speculation.drafters.recurrent:load_redrafter",
        heads=("REDRAFTER",),
        map_refusal=_FIXED_VOCABULARY,
    )
)
register(
    Method(
        "STANDALONE",
        "specserve.speculation.drafters.standalone:StandaloneDrafter.load",
        heads=("STANDALONE",),
        map_refusal="its draft scores with its own head",
    )
)
register(
    replace(
        METHODS["STANDALONE"],
        name="PARD",
        load="specserve.speculation.drafters.pard:PardDrafter.load",
        count_levels="specserve.models.draft.pard:count_levels",
    )
)
register(
    replace(
        _EAGLE_HEAD,
        name="P_EAGLE",
        load="specserve.speculation.drafters.p_eagle:PEagleDrafter.load",
        heads=("P_EAGLE",),
        bundled=None,
        map_refusal=_FIXED_VOCABULARY,
        dynamic_map=False,
        count_levels="specserve.models.draft.p_eagle:count_levels",
    )
)
register(Method("NGRAM", "specserve.speculation.drafters.ngram:NgramDrafter.load", copies="all"))
register(
    Method("SUFFIX", "specserve.speculation.drafters.suffix:SuffixDrafter.load", copies="all", recalls=True)
)
register(replace(METHODS["SUFFIX"], name="REST", recalls=False, reads_datastore=True))
register(
    Method("LOOKAHEAD", "specserve.speculation.drafters.lookahead:LookaheadDrafter.load", looks_ahead=True)
)
register(
    replace(
        _EAGLE_HEAD,
        name="NAIVE_EAGLE",
        heads=("EAGLE", "EAGLE3", "MTP"),
        bundled="eagle3",
        fixed_shape=(1, 1, 2),
    )
)


def _merged(model: Method, lookup: Method) -> Method:
    """Return a method that drafts with a model's checkpoint and copies from a lookup, in one tree."""
    names = [f"{name}{JOIN}{lookup.name}" for name in (model.name, *model.aliases)]
    load = "specserve.speculation.drafters.merged:MergedDrafter.load"
    texts: dict[str, Any] = {"recalls": lookup.recalls, "reads_datastore": lookup.reads_datastore}
    return replace(model, name=names[0], aliases=tuple(names[1:]), load=load, copies="some", **texts)


for _lookup in ("NGRAM", "SUFFIX", "REST"):
    for _model in (
        "EAGLE",
        "EAGLE3",
        "NEXTN",
        "MEDUSA",
        "HYDRA",
        "MLP_SPECULATOR",
        "ARCTIC_LSTM",
        "REDRAFTER",
        "DFLASH",
        "DSPARK",
        "DOMINO",
        "DFLASH2",
        "STANDALONE",
        "PARD",
        "P_EAGLE",
    ):
        register(_merged(METHODS[_model], METHODS[_lookup]))
