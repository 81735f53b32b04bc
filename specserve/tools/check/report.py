"""The report of a check, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the device: measured if ``loaded``, otherwise expected from the shapes of the weights. ``loading``: at
    most while the weights are loaded, before there is a pool; always expected. ``kv_per_token`` and ``pool_tokens``: as
    if all layers kept all tokens. ``states``: of requests, and of ``prefixes`` cached ones. ``full_contexts``: requests
    as long as the context that the pool holds. All are of the first of ``ranks``. ``whole``: of ``weights``, those that
    each rank has whole. ``experts``: of how many layers are how many, in which weights, and what multiplies them."""

    device: str
    loaded: bool
    weights: int
    draft: int
    kv_per_token: int
    pool_tokens: int
    pool: int
    graphs: int
    loading: int
    longest_request: int
    full_contexts: int
    ranks: int = 1
    whole: int = 0
    states: int = 0
    prefixes: int = 0
    experts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of greedy answers. ``by_position[k]``: share of the steps that accepted more than k drafts."""

    prompts: int
    steps: int
    drafted: int
    accepted: int
    tokens_per_step: float
    by_position: list[float]
    same_texts: int


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of ``tokens`` tokens in windows of ``window``. ``rounds``: the flags that quantize; ``plain``: the
    perplexity without them, None if nothing is quantized or, as ``not_compared`` explains, it is unknown."""

    tokens: int
    window: int
    found: float
    plain: float | None = None
    rounds: str = ""
    not_compared: str = ""


@dataclass(slots=True)
class CheckReport:
    """``problems`` should be fixed; ``remarks`` are mismatches that may be intended. ``ranks``: what of the model each
    has."""

    choices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    memory: MemoryUse | None = None
    acceptance: Acceptance | None = None
    perplexity: Perplexity | None = None
    error: str | None = None

    @property
    def exit_code(self) -> int:
        return 2 if self.error is not None else 1 if self.problems else 0

    def json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "exit_code": self.exit_code}, indent=2)

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for title in ("choices", "problems", "remarks", "ranks"):
            yield from _section(title, getattr(self, title))
        if self.memory is not None:
            yield from _section("memory", _memory(self.memory))
        if self.acceptance is not None:
            yield from _section("acceptance", _acceptance(self.acceptance))
        if self.perplexity is not None:
            yield from _section("perplexity", _perplexity(self.perplexity))
        if self.error is not None:
            yield f"can't be loaded: {self.error}"
        else:
            yield "problems: " + str(len(self.problems)) if self.problems else "fine"


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    listed = list(lines)
    if listed:
        yield title
        yield from (f"  {line}" for line in listed)


def _memory(found: MemoryUse) -> Iterator[str]:
    of = f", each of {found.ranks} ranks" if found.ranks > 1 else ""
    yield f"on {found.device}{of}, " + (
        "as loaded" if found.loaded else "expected by the shapes of the weights"
    )
    yield f"weights       {_size(found.weights)}, at most {_size(found.loading)} while they are loaded"
    if found.whole:
        yield f"              {_size(found.whole)} of them are the same on each rank"
    yield from found.experts
    if found.draft:
        yield f"draft         {_size(found.draft)}, without what it shares with the target"
    yield f"KV pool       {_size(found.pool)}: {found.pool_tokens} tokens of {_size(found.kv_per_token)}"
    if found.longest_request > found.pool_tokens:
        yield (
            f"              with sliding windows {found.full_contexts} requests as long as the context at a time, one "
            f"of {found.longest_request} tokens"
        )
    if found.states:
        yield f"states        {_size(found.states)}: of all running requests, and of {found.prefixes} cached prefixes"
    if found.graphs:
        yield f"CUDA graphs   {_size(found.graphs)}"


def _acceptance(found: Acceptance) -> Iterator[str]:
    yield f"{found.tokens_per_step:.2f} tokens a step over {found.steps} steps, greedy, {found.prompts} prompts"
    yield f"{found.accepted} of {found.drafted} drafted tokens accepted"
    shares = " ".join(f"{share:.2f}" for share in found.by_position)
    yield f"steps that accepted 1, 2, ... drafts or more: {shares or 'none'}"
    yield f"{found.same_texts} of {found.prompts} texts are the same without drafting"


def _perplexity(found: Perplexity) -> Iterator[str]:
    yield f"{found.found:.4f} over {found.tokens} tokens, in windows of {found.window}"
    if found.plain is not None:
        more = 100 * (found.found / found.plain - 1)
        yield f"{found.plain:.4f} without {found.rounds}: {more:+.2f}% by rounding"
    if found.not_compared:
        yield f"not compared: {found.not_compared}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
