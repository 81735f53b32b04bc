"""The drafting methods that ``--speculative-algorithm`` names: one record each, and no other module knows their names.

Imports no torch: settings, tools and documentation read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

NONE = "NONE"  # plain decoding
JOIN = "+"  # between the names of two methods that draft into one tree

MOST_COPIED = 16  # levels of text beside a model's drafts: of more than that few are right in one step

Copies = Literal["none", "all", "some"]
"""Which drafts of a method are copied from a text, whatever their number of levels, and part at the root alone."""


@dataclass(frozen=True, slots=True)
class Method:
    """What is to be known of a method before its drafter is loaded.

    ``load``: the function that makes the drafter, ``module:name`` or itself; see ``speculation.drafters``. ``heads``:
    the kinds of draft head that it runs, none: it has no checkpoint. ``bundled``: the folder of the bundled model's
    draft. ``map_refusal``: why it takes no file of ``--speculative-token-map``, None: it does. ``fixed_shape``: steps,
    topk and tokens, where these are in the name. ``copies``: which drafts are copied from a text.
    """

    name: str
    load: str | Callable[..., Any]
    aliases: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    bundled: str | None = None
    map_refusal: str | None = "its drafts don't come from the target's head"
    fixed_shape: tuple[int, int, int] | None = None
    copies: Copies = "none"

    @property
    def needs_draft(self) -> bool:
        """Whether it runs a checkpoint."""
        return bool(self.heads)


METHOD_NAMES = [NONE]
"""Accepted values of the setting, in order; ``register`` extends it."""
_METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Make a method selectable by its name and aliases."""
    for name in (method.name, *method.aliases):
        assert name not in METHOD_NAMES, f"two methods are called {name}"
        _METHODS[name] = method
        METHOD_NAMES.append(name)


def method_of(name: str) -> Method | None:
    """Return the method of a name or an alias, None for plain decoding."""
    return None if name == NONE else _METHODS[name]


def parts_of(name: str) -> list[str]:
    """Return the names of the two methods that the name of a merged one joins."""
    return name.split(JOIN)


def names_where(wanted: Callable[[Method], bool]) -> list[str]:
    """Return the names and aliases of the methods that ``wanted`` accepts."""
    return [name for name in METHOD_NAMES if (method := method_of(name)) is not None and wanted(method)]


_EAGLE = "specserve.speculation.drafters.eagle:EagleDrafter.load"
_OWN_VOCABULARY = (
    "its heads bring a draft vocabulary and the rows for it, trained together, of which --speculative-token-map "
    "dynamic chooses"
)
register(Method("EAGLE", _EAGLE, heads=("EAGLE", "MTP"), bundled="eagle", map_refusal=None))
register(Method("EAGLE3", _EAGLE, heads=("EAGLE3",), bundled="eagle3", map_refusal=_OWN_VOCABULARY))
register(Method("NEXTN", _EAGLE, aliases=("MTP",), heads=("MTP",), map_refusal=None))
register(Method("NGRAM", "specserve.speculation.drafters.ngram:NgramDrafter.load", copies="all"))
register(
    Method(
        "NAIVE_EAGLE",
        _EAGLE,
        heads=("EAGLE", "EAGLE3", "MTP"),
        bundled="eagle3",
        map_refusal=None,
        fixed_shape=(1, 1, 2),
    )
)


def _merged(model: Method, lookup: Method) -> Method:
    """Both in one tree: a model's checkpoint, and what a lookup copies."""
    names = [f"{name}{JOIN}{lookup.name}" for name in (model.name, *model.aliases)]
    load = "specserve.speculation.drafters.merged:MergedDrafter.load"
    return replace(model, name=names[0], aliases=tuple(names[1:]), load=load, copies="some")


for _model in ("EAGLE", "EAGLE3", "NEXTN"):
    register(_merged(_METHODS[_model], _METHODS["NGRAM"]))
