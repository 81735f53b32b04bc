"""Resolve the speculation shape (draft levels, topk, verified nodes) by SGLang's rules, and the token map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specserve.config.notes import CHOSEN, UNUSED, Notes
from specserve.config.settings import SETTINGS, SPECULATION, Settings
from specserve.methods import MAX_NODES, MOST_COPIED, Lookahead, Method, names_like

if TYPE_CHECKING:
    from specserve.models.config import ModelConfig

QUANTIZATION, DATASTORE = "speculative_draft_quantization", "speculative_datastore"
RECALLED = "speculative_suffix_cache_tokens"
SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
LOOKAHEAD = {
    "speculative_lookahead_window": 7,
    "speculative_lookahead_ngram": 5,
    "speculative_lookahead_guesses": 7,
}
"""The sizes of ``Lookahead`` in order, and the smallest that its authors publish figures for."""
DEFAULT = (3, 1, 4)  # SGLang's default for most models
MOST_CANDIDATES = 2**15  # in a slot's pool, which one program of a kernel reads
MAP_FLAG = "--speculative-token-map"
DYNAMIC = "dynamic"
INTERVAL = 8  # steps
ANSWER_TOKENS = 2**20
_OF_DYNAMIC = ("speculative_token_map_size", "speculative_token_map_interval", "speculative_token_map_start")


def resolve_speculation(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    """Return a copy with the shape set, or unset for plain decoding and the controller. Raises ValueError naming the
    flag."""
    given = [name for name in SHAPE if getattr(settings, name) is not None]
    method = settings.method
    settings = _draft_quantization(_without_unused(settings, method, notes), method, notes)
    if method is None:
        return replace(settings, speculative_adaptive=False)
    settings = _texts(settings, method, notes)
    if method.fixed_shape is not None:
        return _fixed(settings, method, method.fixed_shape, given, notes)
    always = not settings.speculative_adaptive and (given or settings.speculative_adaptive is False)
    if always and (sizes := lookahead_of(settings)) is not None:
        return _one_shape(settings, sizes)
    if settings.speculative_adaptive is False and not given:
        note = (
            f"speculation of {DEFAULT} (steps, topk, tokens): --speculative-adaptive is false, no shape given"
        )
        notes[note] = CHOSEN
        return replace(settings, **_shape(*DEFAULT))
    if settings.speculative_adaptive or not given:
        return _adaptive(settings, given, notes)
    if len(given) < len(SHAPE):
        missing = [_flag(name) for name in SHAPE if name not in given]
        raise ValueError(
            f"{_flag(given[0])} is given without {' and '.join(missing)}: give all three or none"
        )
    return _fit(settings, model, notes)


def resolve_slowdown(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    """Note a bound that nothing obeys."""
    if settings.method is None or settings.speculative_adaptive:
        return settings
    return settings.without(("speculative_max_slowdown",), ": all steps have one shape", notes)


def resolve_synthetic(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    """Warn that texts will be wrong. Raises ValueError for a mean that the shape can't reach."""
    if acceptance_rates(settings):
        notes[
            f"speculative_synthetic_acceptance = {settings.speculative_synthetic_acceptance}: drafts are accepted by "
            "chance, so the texts are not the model's"
        ] = UNUSED
    return settings


def acceptance_rates(settings: Settings) -> tuple[float, ...]:
    """Return the probability that a level is accepted after the one above it, by level; deeper levels have the last
    one's. Empty: acceptance is not drawn. A mean becomes steps of it rounded down or up, as in other servers."""
    if settings.speculative_synthetic_acceptance is None:
        return ()
    rates = tuple(float(each) for each in settings.speculative_synthetic_acceptance.split(","))
    if len(rates) > 1 or rates[0] < 1:
        return rates
    flag, levels = _flag("speculative_synthetic_acceptance"), settings.speculative_num_steps
    copies = settings.method is not None and settings.method.copies == "some"
    if levels is None or settings.speculative_eagle_topk != 1 or copies:
        raise ValueError(
            f"{flag}: a mean of {rates[0]:g} tokens a step needs {', '.join(map(_flag, SHAPE))} of a chain (topk 1) of "
            "one method's drafts; without them give the probability of each level, separated by commas"
        )
    if rates[0] > levels + 1:
        raise ValueError(
            f"{flag}: a step of {levels} levels gives at most {levels + 1} tokens, found {rates[0]:g}"
        )
    whole, rest = divmod(rates[0] - 1, 1)
    return (*[1.0] * int(whole), rest, 0.0)


def resolve_token_map(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    """Check the settings of the token map. Raises ValueError for a method that can't use one, and for settings of a
    dynamic map without one.

    ``paths.py`` finds a map's file, ``models/draft/token_map.py`` reads it.
    """
    method, given = settings.method, settings.speculative_token_map
    if method is None:
        return settings
    if given == DYNAMIC:
        if not method.dynamic_map:
            raise ValueError(_map_refused(settings, method, lambda each: each.dynamic_map))
        if settings.speculative_token_map_interval is not None:
            return settings
        return settings.choose("speculative_token_map_interval", INTERVAL, "none was given", notes)
    if unread := [name for name in _OF_DYNAMIC if getattr(settings, name) is not None]:
        raise ValueError(
            f"{_flag(unread[0])} needs {MAP_FLAG} {DYNAMIC}, found {MAP_FLAG} {given or 'not set'}"
        )
    if given is not None and method.map_refusal is not None:
        raise ValueError(_map_refused(settings, method, lambda each: each.map_refusal is None))
    return settings


def _map_refused(settings: Settings, method: Method, takes: Callable[[Method], bool]) -> str:
    found = f"{MAP_FLAG} {DYNAMIC}" if settings.speculative_token_map == DYNAMIC else MAP_FLAG
    algorithm = settings.speculative_algorithm
    return (
        f"{found} can't be used with --speculative-algorithm {algorithm}: {method.map_refusal}; "
        f"accepted with {', '.join(names_like(algorithm, takes))}"
    )


def _without_unused(settings: Settings, method: Method | None, notes: Notes) -> Settings:
    """Drop the settings that the method does not read."""
    algorithm, weights = settings.speculative_algorithm, (QUANTIZATION, "speculative_draft_config_override")
    if method is None:
        idle = {"speculative_adaptive": False, QUANTIZATION: "none"}
        rest = [name for name, declared in SETTINGS.items() if declared.group == SPECULATION]
        unused = [
            name for name in rest[1:] if getattr(settings, name) != idle.get(name, SETTINGS[name].default)
        ]
        return settings.without(unused, f": speculative_algorithm is {algorithm}", notes)
    for names, read, why in (
        (weights, method.needs_draft, f"{method.name} has no weights"),
        ((RECALLED,), method.recalls, f"{algorithm} does not use earlier answers"),
        ((DATASTORE,), method.reads_datastore, f"{algorithm} uses no datastore"),
        (LOOKAHEAD, method.looks_ahead, f"{algorithm} has no window"),
    ):
        if not read:
            settings = settings.without(names, f": {why}", notes)
    return settings


def _draft_quantization(settings: Settings, method: Method | None, notes: Notes) -> Settings:
    """Quantize a draft to 8 bits if that saves bytes and the faster steps outweigh the worse guesses."""
    if settings.speculative_draft_quantization != "auto":
        return settings
    gains = settings.device == "cuda" and settings.dtype in ("bfloat16", "float16")
    if not gains or method is None or not method.needs_draft:
        return replace(settings, speculative_draft_quantization="none")
    return settings.choose(QUANTIZATION, "int8", "draft levels then read half the bytes on a GPU", notes)


def _texts(settings: Settings, method: Method, notes: Notes) -> Settings:
    """Choose how much text a method copies from, or looks ahead at. Raises ValueError for one that lacks a datastore,
    and for more nodes than a tree has."""
    defaults = LOOKAHEAD if method.looks_ahead else {RECALLED: ANSWER_TOKENS} if method.recalls else {}
    for name, value in defaults.items():
        if getattr(settings, name) is None:
            settings = settings.choose(name, value, "none was given", notes)
    if method.reads_datastore and settings.speculative_datastore is None:
        raise ValueError(
            f"{_flag(DATASTORE)}: needed for --speculative-algorithm {settings.speculative_algorithm}: a file written "
            "by python -m specserve.datastore or by REST's own tools"
        )
    sizes, (window, ngram, guesses) = lookahead_of(settings), map(_flag, LOOKAHEAD)
    if sizes is not None and (nodes := sizes.shape[2]) > MAX_NODES:
        raise ValueError(
            f"{window}: ({ngram} - 1) * ({window} + {guesses}) must be at most {MAX_NODES}, the nodes of a tree, "
            f"found ({sizes.ngram} - 1) * ({sizes.window} + {sizes.guesses}) = {nodes}"
        )
    return settings


def _one_shape(settings: Settings, sizes: Lookahead) -> Settings:
    """Draft in every step the tree that the sizes imply."""
    for name, value in zip(SHAPE, sizes.shape, strict=True):
        if getattr(settings, name) not in (None, value):
            raise ValueError(
                f"{_flag(name)}: {', '.join(map(_flag, LOOKAHEAD))} make it {value}, found {getattr(settings, name)}"
            )
    return replace(settings, **_shape(*sizes.shape))


def shape_of(settings: Settings) -> tuple[int, int, int] | None:
    """Return steps, topk and tokens of every step; None for plain decoding and for the controller."""
    steps, topk, tokens = (getattr(settings, name) for name in SHAPE)
    return None if steps is None or topk is None or tokens is None else (steps, topk, tokens)


def lookahead_of(settings: Settings) -> Lookahead | None:
    """Return the sizes of lookahead decoding; None if the method has none."""
    window, ngram, guesses = (getattr(settings, name) for name in LOOKAHEAD)
    return None if window is None or ngram is None or guesses is None else Lookahead(window, ngram, guesses)


def _fixed(
    settings: Settings, method: Method, shape: tuple[int, int, int], given: list[str], notes: Notes
) -> Settings:
    """Use the shape that the method's name implies."""
    algorithm, heads = settings.speculative_algorithm, set(method.heads)
    others = " or ".join(
        names_like(algorithm, lambda each: not each.has_one_shape and not heads.isdisjoint(each.heads))
    )
    if settings.speculative_adaptive:
        raise ValueError(
            f"--speculative-adaptive chooses the shape of each step; {algorithm} fixes it: use {others}"
        )
    for name, value in zip(SHAPE, shape, strict=True):
        if name in given and getattr(settings, name) != value:
            raise ValueError(
                f"{_flag(name)}: --speculative-algorithm {algorithm} has {value}, found {getattr(settings, name)}; "
                f"for other shapes use {others}"
            )
    if len(given) < len(SHAPE):
        notes[f"speculation of {shape} (steps, topk, tokens): the algorithm is {algorithm}"] = CHOSEN
    return replace(settings, **_shape(*shape))


def _adaptive(settings: Settings, given: list[str], notes: Notes) -> Settings:
    """Let the controller choose the shape of each step."""
    if given:
        raise ValueError(
            f"--speculative-adaptive chooses the shape of each step; {_flag(given[0])} fixes it: give only one of them"
        )
    if not settings.speculative_adaptive:
        notes[f"speculative_adaptive = true: none of {', '.join(map(_flag, SHAPE))} was given"] = CHOSEN
    return replace(settings, speculative_adaptive=True)


def _fit(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    steps, topk, tokens = (getattr(settings, name) for name in SHAPE)
    copies = "none" if settings.method is None else settings.method.copies
    if topk == 1 and tokens != steps + 1 and copies != "some":
        why = f"topk 1 verifies the whole chain of {steps} drafts and its root; {tokens} was given"
        tokens = steps + 1
        notes[f"speculative_num_draft_tokens = {tokens}: {why}"] = UNUSED
        settings = replace(settings, speculative_num_draft_tokens=tokens)
    from specserve_kernels import tree_pool_size  # imports torch

    def candidates(levels: int) -> int:
        pool = levels * topk if copies == "all" else tree_pool_size(levels, topk)
        return pool + MOST_COPIED * topk if copies == "some" else pool

    pool, most = candidates(steps), model.most_levels
    if tokens > pool + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens: {steps} steps of topk {topk} draft {pool} candidates, so at "
            f"most {pool + 1} tokens with the root, found {tokens}"
        )
    check_pool("--speculative-num-steps", steps, topk)
    if most is None or steps <= most:
        return settings
    fewer = most, topk, min(tokens, candidates(most) + 1)
    why = f"{model.architecture} verifies at most {most} levels, {steps} were given"
    notes[f"speculation of {fewer} (steps, topk, tokens): {why}"] = UNUSED
    return replace(settings, **_shape(*fewer))


def check_pool(flag: str, steps: int, topk: int) -> None:
    """Raise ValueError naming the flag of ``steps`` if a step can't hold this many candidates."""
    from specserve_kernels import tree_pool_size

    pool = tree_pool_size(steps, topk)
    if pool > MOST_CANDIDATES:
        deepest = next(n for n in range(steps, 0, -1) if tree_pool_size(n, topk) <= MOST_CANDIDATES)
        raise ValueError(
            f"{flag}: {steps} steps of topk {topk} draft {pool} candidates, at most "
            f"{MOST_CANDIDATES} fit a step: with this topk at most {deepest} steps"
        )


def _shape(*values: int) -> dict[str, Any]:
    return dict(zip(SHAPE, values, strict=True))


def _flag(name: str) -> str:
    return SETTINGS[name].flag
