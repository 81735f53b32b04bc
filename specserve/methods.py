"""The drafting methods that ``--speculative-algorithm`` selects, one record each; no other module knows their names.

Imports no torch, because settings, tools and documentation read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

NONE = "NONE"  # plain decoding
JOIN = "+"  # between the names of two methods that draft into one tree

MAX_NODES = 64
"""Most nodes of a slot's tree and candidates of a node: those of ``specserve_kernels``, which imports torch."""
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
        return deepest, min(self.guesses + 2, MAX_NODES), self.generations * (self.window + self.guesses)


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


class MapPlan(NamedTuple):
    """A dynamic token map of ``size`` tokens (None: the default), reviewed every ``interval`` steps. It starts from the
    file ``start`` or, if None, from the lowest ids."""

    size: int | None
    interval: int
    start: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """How tokens are drafted. ``name``: the method. ``path``: the checkpoint, for a method that has one.
    ``config_override``: a JSON object that overrides fields of its config. ``quantization`` of its weights: none, int8
    (with int8 activations) or fp8. ``token_map``: a file of the only tokens to draft, or the plan of a dynamic map.
    ``topk``: maximum number of candidates of a node in a fixed shape. ``tokenizer``: the directory of the target's.
    ``recalled``: tokens of earlier answers kept to propose from. ``datastore``: the file to propose from.
    ``synthetic``: the rates of ``SyntheticAcceptance``, empty: drafts are compared with what the target chose.
    ``random``: its weights are drawn instead of read."""

    name: str
    path: Path
    config_override: str | None = None
    quantization: str = "none"
    token_map: Path | MapPlan | None = None
    topk: int = 1
    drafts: Drafts = ANY
    tokenizer: Path | None = None
    recalled: int = 0
    datastore: Path | None = None
    synthetic: tuple[float, ...] = ()
    random: bool = False

    @property
    def method(self) -> Method:
        return METHODS[self.name]


@dataclass(frozen=True, slots=True)
class Method:
    """A drafting method, as far as it is known before its drafter is loaded.

    ``load``: the function that makes the drafter of ``DraftSettings`` and a target, or its ``module:name``.
    ``heads``: the kinds of draft head that it runs, empty: it has no checkpoint. ``bundled``: the folder of the bundled
    model's draft. ``map_refusal``: why it takes no ``--speculative-token-map`` file, None: it takes one.
    ``dynamic_map``: it takes a dynamic token map. ``fixed_shape``: steps, topk and tokens, if the name implies them.
    ``looks_ahead``: the sizes of ``Lookahead`` do. ``copies``: which drafts are copied from a text. ``recalls``:
    earlier answers are among these texts. ``reads_datastore``: a datastore file is.
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
    found: Callable[..., Any] = resolve_name(function) if isinstance(function, str) else function
    return found


METHOD_NAMES = [NONE]
"""Accepted values of the setting, in order; ``register`` extends it."""
METHODS: dict[str, Method] = {}
_WITH_MTP = "deepseek", "glm4_moe", "glm4_moe_lite", "mimo", "qwen3_5", "qwen3_next"
ELSEWHERE = {
    "draft_model": "STANDALONE",
    "ngram_gpu": "NGRAM",
    **{f"{name}_mtp": "MTP" for name in _WITH_MTP},
}
"""vLLM's names of methods, and ours."""


def register(method: Method) -> Method:
    """Make a method selectable by its name and aliases. Return it."""
    for name in (method.name, *method.aliases):
        assert name not in METHOD_NAMES, f"two methods are called {name}"
        METHODS[name] = method
        METHOD_NAMES.append(name)
    return method


def method_of(name: str) -> Method | None:
    """Return the method of a name or an alias, None for plain decoding."""
    return None if name == NONE else METHODS[name]


OWN_HEADS = {
    "MTP": ("MiMoForCausalLM",),
    "NEXTN": (
        *("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"),
        *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ),
}
"""Kinds of draft head that a target's checkpoint may contain, and the targets' architectures."""


def own_heads(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the field of a ``config.json`` that counts a target's own heads, and its value, None if it is absent."""
    names = "mtp_num_hidden_layers", "num_nextn_predict_layers"
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, dict) else {})}
    return next(((name, fields[name]) for name in names if name in fields), (names[-1], None))


MODEL_TYPES = {"gemma4_assistant": "GEMMA4_ASSISTANT", "gemma4_unified_assistant": "GEMMA4_ASSISTANT"}
"""Methods of drafts that only one method runs, by the ``model_type`` of their ``config.json``."""


def fitting(algorithm: str, draft: Path) -> str:
    """Return the algorithm, with the method that the draft's ``model_type`` names in place of another."""
    try:
        kind = json.loads((draft / "config.json").read_text())["model_type"]
        return JOIN.join([MODEL_TYPES[kind], *parts_of(algorithm)[1:]])
    except (OSError, ValueError, LookupError, TypeError):  # loading the draft reports the error
        return algorithm


def carries_draft(algorithm: str, model_path: Path) -> bool:
    """Return whether the model's own checkpoint contains the head that the algorithm runs, so that no draft is
    needed."""
    method = method_of(algorithm)
    own = {name for kind in (method.heads if method else ()) for name in OWN_HEADS.get(kind, ())}
    try:
        config = json.loads((model_path / "config.json").read_text())
        return not own.isdisjoint(config["architectures"]) and own_heads(config)[1] != 0
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


_DRAFTERS, _MODELS = "specserve.speculation.drafters", "specserve.models.draft"
_FIXED_VOCABULARY = "its heads were trained for the tokens that they score"


def _head(name: str, load: str, **more: Any) -> Method:
    """Register a method that runs a kind of head with its name. ``load``: a function, as module and name."""
    given = {"heads": (name,), "map_refusal": _FIXED_VOCABULARY, **more}
    return register(Method(name, f"{_DRAFTERS}.{load}", **given))


def _levels(opens: str) -> Callable[[Path], int]:
    """Return what counts the levels of a checkpoint that a function, given as module and name, opens."""
    return lambda draft: int(named(f"{_MODELS}.{opens}")(draft).levels)


_EAGLE: dict[str, Any] = {"load": "eagle:EagleDrafter.load", "dynamic_map": True}
_OWN_VOCABULARY = (
    "its heads have a trained draft vocabulary, from which --speculative-token-map dynamic chooses"
)
_head("EAGLE", **_EAGLE, heads=("EAGLE", *OWN_HEADS), bundled="eagle", map_refusal=None)
_head("EAGLE3", **_EAGLE, bundled="eagle3", map_refusal=_OWN_VOCABULARY)
_head("NEXTN", **_EAGLE, aliases=("MTP",), heads=(*OWN_HEADS,), map_refusal=None)
_head("MEDUSA", "medusa:MedusaDrafter.load", count_levels=_levels("medusa:open_medusa"), bundled="medusa")
_head(
    "MLP_SPECULATOR",
    "recurrent:load_mlp_speculator",
    count_levels=_levels("mlp_speculator:open_speculator"),
    bundled="mlp_speculator",
)
for _name in ("DFLASH", "DSPARK", "DOMINO", "DFLASH2"):
    _head(
        _name,
        "block:BlockDrafter.load",
        count_levels=_levels("block_source:open_block"),
        block_size=f"{_MODELS}.block_source:block_size",
        bundled="dspark" if _name == "DSPARK" else None,
        map_refusal="it scores with the target's whole head or with rows that it was trained with",
    )
_head("HYDRA", "hydra:load_hydra", count_levels=_levels("hydra:open_hydra"))
_head("ARCTIC_LSTM", "recurrent:load_arctic_lstm", count_levels=_levels("arctic_lstm:open_arctic"))
_head("REDRAFTER", "recurrent:load_redrafter")
_OWN_HEAD = "its draft scores with its own head"
_head("STANDALONE", "standalone:StandaloneDrafter.load", map_refusal=_OWN_HEAD)
_head(
    "PARD",
    "pard:PardDrafter.load",
    count_levels=f"{_DRAFTERS}.pard:count_levels",
    heads=("STANDALONE",),
    map_refusal=_OWN_HEAD,
)
_head("GEMMA4_ASSISTANT", "assistant:AssistantDrafter.load", map_refusal=_OWN_HEAD)
_head("P_EAGLE", "p_eagle:PEagleDrafter.load", count_levels=f"{_MODELS}.p_eagle:count_levels")
register(Method("NGRAM", f"{_DRAFTERS}.ngram:NgramDrafter.load", copies="all"))
_SUFFIX = register(Method("SUFFIX", f"{_DRAFTERS}.suffix:SuffixDrafter.load", copies="all", recalls=True))
register(replace(_SUFFIX, name="REST", recalls=False, reads_datastore=True))
register(Method("LOOKAHEAD", f"{_DRAFTERS}.lookahead:LookaheadDrafter.load", looks_ahead=True))
_head(
    "NAIVE_EAGLE",
    **_EAGLE,
    heads=("EAGLE", "EAGLE3", *OWN_HEADS),
    bundled="eagle3",
    map_refusal=None,
    fixed_shape=(1, 1, 2),
)


def _merged(model: Method, lookup: Method) -> Method:
    """Return a method that drafts with a model's checkpoint and copies from a lookup, in one tree."""
    names = [f"{name}{JOIN}{lookup.name}" for name in (model.name, *model.aliases)]
    load = "specserve.speculation.drafters.merged:MergedDrafter.load"
    texts: dict[str, Any] = {"recalls": lookup.recalls, "reads_datastore": lookup.reads_datastore}
    return replace(model, name=names[0], aliases=tuple(names[1:]), load=load, copies="some", **texts)


for _lookup in ("NGRAM", "SUFFIX", "REST"):
    for _model in dict.fromkeys(METHODS.values()):
        if _model.needs_draft and not _model.has_one_shape and JOIN not in _model.name:
            register(_merged(_model, METHODS[_lookup]))
