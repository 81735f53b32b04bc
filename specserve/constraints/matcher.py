"""Grammars: the tokens that may come next in an answer constrained to a JSON schema, a regular expression or a choice.

They are compiled by llguidance, which refuses what it can't enforce. A request's *matcher* has consumed its output.
After a tree's node, exactly the tokens that continue its path are allowed, so the text is that of plain decoding. Nodes
are evaluated on copies of the matcher, because undoing tokens would leave traces.

Shapes: T packed nodes, W words of 32 tokens each.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specserve.constraints import thinking as thoughts
from specserve.constraints.grammar import is_of_schemas, with_deep_stack
from specserve.constraints.thinking import ThoughtState
from specserve.core import SamplingParams
from specserve.models.config import read_json

KEPT = 64  # most compiled grammars in the cache (LRU)
KEPT_CHARACTERS = 1 << 20  # most characters of their sources together, which bounds the cache's memory
MOST_THREADS = 16
QUICK = 0.01  # seconds of compilation below which a grammar is compiled once for each thread
TOKEN_BYTES = 8  # estimated bytes of a token of forced text
MOST_ITEMS = 5000  # parser items for one token: about 0.1 s of work if a grammar is ambiguous
OF_SCHEMAS = {"step_max_items": 500_000, "max_items_in_row": 5000, "step_lexer_fuel": 500_000}
"""The limits for grammars made from schemas, where 1000 optional properties take 0.1 s: with a vocabulary of 65,000
tokens, a property takes 200 items."""
Words = npt.NDArray[np.int32]
Look = Any
"""Decides which tokens may follow a node: a matcher, the only allowed token, or None for no restriction."""


class GrammarError(ValueError):
    """The grammar can't follow an answer any further: it became too ambiguous or has too many states."""


class Grammars:
    """Compiles grammars for a tokenizer, without added tokens beyond the model's ``vocab_size``. ``end_ids``: tokens
    that end an answer where the grammar allows it."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: Sequence[int], threads: int = 1) -> None:
        """Raise ImportError without llguidance, ValueError without a ``tokenizer.json`` that it reads."""
        import llguidance

        if not tokenizer.is_file():
            raise ValueError(f"needs {tokenizer.name} next to the model, which has none")
        fields = read_json(tokenizer)
        fields["added_tokens"] = [each for each in fields.get("added_tokens", ()) if each["id"] < vocab_size]
        self._tokenizer = llguidance.LLTokenizer(
            json.dumps(fields), n_vocab=vocab_size, eos_token=list(end_ids)
        )
        self._limits = llguidance.LLParserLimits(step_max_items=MOST_ITEMS, verbose_errors=False)
        self._limits_of_schemas = llguidance.LLParserLimits(**OF_SCHEMAS, verbose_errors=False)
        self._matcher = llguidance.LLMatcher
        self._compiled: OrderedDict[str, list[_Lane]] = OrderedDict()
        self._threads = min(threads, MOST_THREADS)
        self._executor = llguidance.LLExecutor(num_threads=self._threads)
        self.words = -(-self._tokenizer.vocab_size // 32)

    def compile(self, grammar: str) -> Future[object]:
        """Start to compile, without blocking. A grammar that compiles quickly is compiled again for each further
        request, up to once for each thread: see ``_Lane``. The result raises ValueError for a grammar that can't be
        enforced."""
        return with_deep_stack(self._compile, grammar)

    def _compile(self, grammar: str) -> Any:
        if (lanes := self._compiled.get(grammar)) is not None:
            with contextlib.suppress(KeyError):  # forgotten meanwhile
                self._compiled.move_to_end(grammar)
            room = self._characters + len(grammar) <= KEPT_CHARACTERS
            if room and len(lanes) < self._threads and lanes[0].seconds < QUICK:
                lanes.append(self._made(grammar))
            return lanes
        lanes = self._compiled[grammar] = [self._made(grammar)]
        while len(self._compiled) > KEPT or (len(self._compiled) > 1 and self._characters > KEPT_CHARACTERS):
            self._compiled.popitem(last=False)  # the newest stays, however long
        return lanes

    def _made(self, grammar: str) -> _Lane:
        begun = time.thread_time()
        limits = self._limits_of_schemas if is_of_schemas(grammar) else self._limits
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        begin = matcher.deep_copy()
        if not matcher.is_error():
            begin.compute_bitmask()
        if begin.is_error() or (warnings := matcher.get_grammar_warnings()):
            raise ValueError(_first_line(begin.get_error() or "; ".join(warnings)))
        return _Lane(matcher, time.thread_time() - begun)

    @property
    def _characters(self) -> int:
        """Length of all cached grammars."""
        return sum(len(text) * len(lanes) for text, lanes in [*self._compiled.items()])

    def start(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Return a matcher that has consumed ``output``. Raises GrammarError."""
        lanes: Any = self._compiled.get(grammar) or self.compile(grammar).result()
        lane = min(lanes, key=lambda lane: len(lane.users))
        matcher = Matcher(lane.matcher.deep_copy(), self._tokenizer, self.words, id(lane))
        lane.users.add(matcher)
        matcher.consume(output)
        return matcher

    def fill(
        self, trees: Sequence[tuple[int, Sequence[Look]]], words_TW: Tensor
    ) -> list[dict[int, GrammarError]]:
        """Write the masks of all nodes, without a restriction for those of no tree. ``trees``: each root's row in
        ``words_TW``, and the result of ``after_nodes``; threads take neighbours, so trees of a lane should be next to
        each other. Return, for each tree, the errors by node: an answer that gets to such a node ends there."""
        words, jobs, written = words_TW.numpy().view(np.uint32), [], set[int]()
        for first, looks in trees:
            for node, look in enumerate(looks, first):
                if isinstance(look, int):
                    words[node] = 0
                    words[node, look // 32] = 1 << look % 32
                    written.add(node)
                elif look is not None and not look.is_error():
                    jobs.append((look, node))
        if jobs:
            self._executor.unsafe_compute_mask_ptr(jobs, words_TW.data_ptr(), 4 * self.words, len(words_TW))
        written.update(node for matcher, node in jobs if not matcher.is_error())
        words[[node for node in range(len(words)) if node not in written]] = ~np.uint32(0)
        errors = [[(node, _error_of(look)) for node, look in enumerate(looks)] for _, looks in trees]
        return [{node: error for node, error in tree if error is not None} for tree in errors]

    def constraint(self, params: SamplingParams, output: Sequence[int]) -> Constraint:
        """Return what constrains an answer so far: a grammar, a thinking budget, or both. Raises GrammarError."""
        matcher, thinking, budget = None, None, params.thinking_token_budget
        if budget is not None:
            assert params.thought is not None, "admission refuses a budget without marks of reasoning"
            decode = self._tokenizer.decode_bytes
            thinking = ThoughtState.begin(params.thought, budget, lambda token: bytes(decode([token])))
        if params.grammar is not None:
            matcher = self.start(params.grammar, [])
        constraint = Constraint(matcher, thinking)
        constraint.consume(output)
        return constraint

    def forget(self, grammar: str) -> None:
        """Drop a compiled grammar: the states that one answer filled up would be full for all answers."""
        self._compiled.pop(grammar, None)


@dataclass(frozen=True, slots=True)
class _Lane:
    """A compiled grammar. Its copies share tables and a lock, so only copies of different lanes run in parallel."""

    matcher: Any
    seconds: float  # to compile it
    users: WeakSet[Matcher] = field(default_factory=WeakSet)


class Matcher:
    """Tracks an answer in a grammar. ``lane``: a number shared with other copies of the same compiled grammar."""

    def __init__(self, matcher: Any, tokenizer: Any, words: int, lane: int) -> None:
        self.lane = lane
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._words = words
        self._forced: list[int] = []
        self._whole: Any = None  # before the character that a thought ends within

    def consume(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the answer. Raises GrammarError."""
        followed = self._forced[: len(tokens)] == list(tokens)
        self._forced = self._forced[len(tokens) :] if followed else []
        self._matcher.consume_tokens(list(tokens))
        if (error := _error_of(self._matcher)) is not None:
            raise error

    def consume_thought(self, token: int, before: ThoughtState, after: ThoughtState) -> None:
        """Advance by a token of an answer with a thinking budget, from one state to the next. A grammar takes whole
        characters only: one that the budget cuts is taken back. Raises GrammarError."""
        if before.cut:
            self._matcher = self._whole
        elif after.half and self._whole is None:
            self._whole = self._matcher.deep_copy()
        if not after.half:
            self._whole = None
        self.consume([token])

    def mask(self) -> Words:
        """Return the allowed next tokens as one bit each, ``[W]``. Raises GrammarError."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        if (error := _error_of(self._matcher)) is not None:
            raise error
        return words

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens of the text that has to come next, as the tokenizer splits it, and the end token
        if nothing may follow. A model may split it differently, for example by joining the last piece with what
        follows. The tokens are kept while the answer follows them."""
        if not self._forced:
            copy = self._matcher.deep_copy()
            text = copy.compute_ff_bytes()
            forced = list(self._tokenizer.tokenize_bytes(text[: most * TOKEN_BYTES])) if text else []
            if len(text) > most * TOKEN_BYTES:
                forced.pop()  # its text may be cut
            forced = forced[:most]
            copy.try_consume_tokens(forced)
            self._forced = [*forced, self._tokenizer.eos_token] if copy.is_stopped() else forced
        return self._forced[:most]

    def after_nodes(
        self, tokens: Sequence[int], parents: Sequence[int], states: Sequence[ThoughtState] | None = None
    ) -> list[Look]:
        """Return a matcher for each node of a tree whose root is the answer's last token, None for a node whose token
        is not allowed there, since it is never accepted. A matcher that can't follow its node, because it is too
        ambiguous or has too many states, is in error. ``parents``: indices of earlier nodes. ``states``: the thinking
        budget's, see ``consume_thought``."""
        at, whole = [self._matcher], [self._whole]
        for node, (token, parent) in enumerate(zip(tokens[1:], parents[1:], strict=True), 1):
            cut, half = (states[parent].cut, states[node].half) if states else (False, False)
            begin = whole[parent] if cut else at[parent]
            at.append(_after(begin, token))
            whole.append((begin if whole[parent] is None else whole[parent]) if half else None)
        return at


def _after(matcher: Look, token: int) -> Look:
    """Return a copy that has consumed a token, None if that is not allowed."""
    if matcher is None:
        return None
    copy = matcher.deep_copy()
    return copy if copy.try_consume_tokens([token]) == 1 or copy.is_error() else None


class Constraint:
    """An answer's grammar and thinking budget. Where a thought has to end, the budget determines the next token, and
    the grammar of an answer that may reason allows it."""

    def __init__(self, matcher: Matcher | None, thinking: ThoughtState | None) -> None:
        self._matcher = matcher
        self._thinking = thinking

    @property
    def lane(self) -> int:
        """A number shared with answers of the same compiled grammar; 0: no grammar."""
        return 0 if self._matcher is None else self._matcher.lane

    @property
    def free_tokens(self) -> float:
        """Number of next tokens that are certainly unconstrained: infinity once nothing constrains the answer."""
        if self._matcher is not None:
            return 0
        return inf if self._thinking is None else self._thinking.free_tokens

    def consume(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the answer. Raises GrammarError."""
        if self._thinking is None:
            if self._matcher is not None:
                self._matcher.consume(tokens)
            return
        for token in tokens:
            before, self._thinking = self._thinking, self._thinking.after(token)
            if self._matcher is not None:
                self._matcher.consume_thought(token, before, self._thinking)

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens of the text that has to come next."""
        forced = [] if self._thinking is None else self._thinking.forced
        return forced[:most] if forced or self._matcher is None else self._matcher.forced(most)

    def after_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Look]:
        """Return what decides the allowed tokens after each node, as ``Matcher.after_nodes`` does. A tree of a root
        alone gives the answer's next token."""
        nothing: list[Look] = [None] * len(tokens)
        if self._thinking is None:
            return nothing if self._matcher is None else self._matcher.after_nodes(tokens, parents)
        states = thoughts.after_nodes(self._thinking, tokens, parents)
        looks = nothing if self._matcher is None else self._matcher.after_nodes(tokens, parents, states)
        return [
            look if state.forced_token is None or _error_of(look) is not None else state.forced_token
            for look, state in zip(looks, states, strict=True)
        ]


def _error_of(look: Look) -> GrammarError | None:
    if look is None or isinstance(look, int) or not look.is_error():
        return None
    return GrammarError(_first_line(look.get_error()))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
