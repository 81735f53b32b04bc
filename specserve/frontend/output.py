"""One request's answer: the engine's tokens in, text out. The server and ``LLM`` both use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob
from specserve.frontend.answers import AnswerParser
from specserve.frontend.parsers.base import Event, merged, overlap
from specserve.frontend.tokenizer import Detokenizer, Tokenizer
from specserve.messages import FinishReason, Tokens


@dataclass(slots=True)
class Delta:
    """What one engine message adds to an answer. ``text`` may lag behind ``token_ids`` but never leads.

    ``runs`` splits ``token_ids`` by step, as in the message. ``pieces``, if requested, splits ``text`` by the token
    that made it certain. ``events`` is what the parser found in it, if there is one.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    runs: list[int]
    pieces: list[str] | None
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """An answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # without the first token
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    cached_tokens: int = 0
    speculation: SpeculationUsage = field(default_factory=SpeculationUsage)
    events: list[Event] = field(default_factory=list)  # merged
    reasoning_tokens: int = 0  # including its marks


class OutputProcessor:
    """Detokenize, find stop strings and count tokens. Push messages until one gives a finish reason.

    A stop string ends the answer at the token that completes it; later tokens are not counted. If ``must_abort`` is
    true, the engine does not know yet and must be told. ``detokenizer`` None: no text. ``by_token``: deltas tell which
    text came with which token; needed by a parser that separates reasoning. ``parser``: parses the text.
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        by_token: bool = False,
        parser: AnswerParser | None = None,
    ) -> None:
        self.answer = Answer()
        self.must_abort = False
        self._params = params
        self._detokenizer = detokenizer
        self._by_token = by_token and detokenizer is not None
        self._parser = parser
        self._length = 0  # characters decoded
        self._stop: StopFinder | None = None
        if detokenizer and params.stop:
            self._stop = StopFinder(params.stop, params.include_stop_str_in_output)

    def push(self, message: Tokens) -> Delta:
        """Add a message to the answer; return what it added."""
        parts, kept, stopped = self._read(message)
        reason: FinishReason | None = "stop" if stopped else message.finish_reason
        self.must_abort = stopped and message.finish_reason is None
        logprobs = message.logprobs[:kept] if message.logprobs is not None else None
        delta = Delta(
            "".join(parts),
            message.token_ids[:kept],
            logprobs,
            reason,
            _kept_runs(message.runs, kept),
            _by_token(parts, kept) if self._by_token else None,
        )
        if self._parser is not None:
            self._parse(delta, self._parser, cut=stopped or reason == "length")
        self._add(delta, message)
        return delta

    def _read(self, message: Tokens) -> tuple[list[str], int, bool]:
        """Return the new text in parts, how many tokens count, and whether a stop string was found."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return [], len(message.token_ids), False
        hidden = message.stop_token and not self._params.include_stop_str_in_output
        visible = message.token_ids[:-1] if hidden else message.token_ids
        if self._stop is not None:
            return self._read_to_stop(detokenizer, self._stop, visible, message)
        apart = self._by_token or not detokenizer.marks.keys().isdisjoint(visible)
        pushes = [[token] for token in visible] if apart else [visible] if visible else []
        parts = [self._decode(detokenizer, push) for push in pushes]
        if message.finish_reason:
            parts.append(detokenizer.flush())
        return parts, len(message.token_ids), False

    def _decode(self, detokenizer: Detokenizer, token_ids: list[int]) -> str:
        """Return the text that became certain with tokens, and tell the parser of a mark, the last of them."""
        text = detokenizer.push(token_ids)
        self._length += len(text)
        mark = detokenizer.marks.get(token_ids[-1])
        if mark is not None and self._parser is not None:
            self._parser.mark(mark, self._length - len(mark))
        return text

    def _read_to_stop(
        self, detokenizer: Detokenizer, stop: StopFinder, visible: list[int], message: Tokens
    ) -> tuple[list[str], int, bool]:
        """Read token by token, because the answer ends at the one that completes the stop string."""
        parts, have = [], len(self.answer.token_ids)
        for index, token in enumerate(visible):
            armed = have + index + 1 >= self._params.min_tokens
            text, found = self._search(detokenizer, stop, token, armed)
            parts.append(text)
            if found:
                return parts, index + 1, True
        found = False
        if message.finish_reason:
            text, found = stop.feed(detokenizer.flush(), have + len(visible) >= self._params.min_tokens)
            parts += [text, stop.flush()]
        return parts, len(message.token_ids), found

    def _search(
        self, detokenizer: Detokenizer, stop: StopFinder, token: int, armed: bool
    ) -> tuple[str, bool]:
        """Return the text that became certain with a token, and whether a stop string did. A special token without text
        is searched by the text that it would have."""
        mark = detokenizer.hidden.get(token)
        if mark is None:
            return stop.feed(self._decode(detokenizer, [token]), armed)
        text, found = stop.feed(mark, armed, hidden=True)
        if not found:
            return text, False
        assert stop.found is not None
        at = len(text) - len(stop.found) * self._params.include_stop_str_in_output
        return text[:at] + detokenizer.flush() + text[at:], True  # half a character may be before the mark

    def _parse(self, delta: Delta, parser: AnswerParser, cut: bool) -> None:
        """Add the parser's events, and count the tokens of reasoning. ``cut``: the model did not end the answer."""
        have = len(self.answer.token_ids)
        for number, piece in enumerate(delta.pieces or [delta.text], have + 1):
            before = parser.thinking
            delta.events += parser.feed(piece)
            if before or parser.thinking:
                self.answer.reasoning_tokens = min(number, have + len(delta.token_ids))
        if delta.finish_reason:
            delta.events += parser.finish(cut)

    def _add(self, delta: Delta, message: Tokens) -> None:
        answer = self.answer
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs or []
        answer.prompt_logprobs += message.prompt_logprobs or []
        answer.events = merged([*answer.events, *delta.events])
        answer.finish_reason = delta.finish_reason
        answer.stop = self._stop.found if self._stop is not None else None
        answer.cached_tokens = max(answer.cached_tokens, message.cached_tokens)
        if message.speculation is not None:
            before, kept = answer.speculation.predicted, len(delta.token_ids)
            answer.speculation = _trim(message.speculation, message.runs, kept, before)


def output_processor(
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    params: SamplingParams,
    parser: AnswerParser | None,
    by_token: bool = False,
) -> OutputProcessor:
    """Make the processor for an answer to ``prompt``. Without a tokenizer there is no text."""
    detokenizer = None
    if tokenizer is not None:
        marks = parser.marks if parser else ()
        detokenizer = tokenizer.detokenizer(prompt, params.skip_special_tokens, marks)
    by_token = by_token or (parser is not None and parser.tells_reasoning)
    return OutputProcessor(params, detokenizer, by_token, parser)


def _by_token(parts: list[str], tokens: int) -> list[str]:
    """Return one piece per token. Text held back until the end goes to the last token."""
    if not tokens:
        return []
    before = parts[: tokens - 1]
    return [*before, *[""] * (tokens - 1 - len(before)), "".join(parts[tokens - 1 :])]


def _kept_runs(runs: list[int], kept: int) -> list[int]:
    """Return the runs of a message's first ``kept`` tokens."""
    found = []
    for length in runs:
        if kept > 0:
            found.append(min(length, kept))
        kept -= length
    return found


def _trim(usage: SpeculationUsage, runs: list[int], kept: int, before: int) -> SpeculationUsage:
    """Subtract the steps and accepted drafts of a message's tokens beyond the first ``kept``.

    The drafted count stays, because those nodes were verified. The last kept token of a step counts as its bonus token,
    so tokens still equal accepted drafts plus steps. Prediction tokens are assumed to come first in the message;
    ``before`` were counted in earlier ones.
    """
    predicted = min(usage.predicted, before + kept)
    steps, accepted = usage.steps, usage.accepted
    for length in runs:
        left = max(0, min(length, kept))
        kept -= length
        steps -= left == 0
        accepted -= length - max(left, 1)
    return SpeculationUsage(
        steps=max(steps, 0), drafted=usage.drafted, accepted=max(accepted, 0), predicted=predicted
    )


class StopFinder:
    """Pass text on until a stop string is complete, and hold back an end that may be the beginning of one.

    The result does not depend on how the text is cut into pieces. The stop string that is complete first counts, and
    among those that end together the longest. It is ``found``. Hidden text is searched, but not passed on.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        """``included``: the stop string is part of the answer, hidden or not."""
        self._stops = stops
        self._included = included
        self._held = ""
        self._shown: list[bool] = []  # of each character held back
        self.found: str | None = None

    def feed(self, text: str, armed: bool = True, hidden: bool = False) -> tuple[str, bool]:
        """Return the text that is certainly before any stop string, with the one found if it is ``included``; and
        whether one was found.

        Stop strings that become complete while not ``armed`` are ordinary text.
        """
        seen, whole = len(self._held), self._held + text
        self._held, self._shown = whole, [*self._shown, *[not hidden] * len(text)]
        if armed and (place := self._find(whole, seen)) is not None:
            self.found = whole[slice(*place)]
            before = self._take(place[0])
            self._held, self._shown = "", []
            return before + (self.found if self._included else ""), True
        held = max((overlap(whole, stop) for stop in self._stops), default=0)  # a stop string may begin there
        return self._take(len(whole) - held), False

    def flush(self) -> str:
        """Return the text held back, after the last piece."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Return the first characters held back, but not the hidden ones."""
        taken = "".join(compress(self._held[:count], self._shown))
        self._held, self._shown = self._held[count:], self._shown[count:]
        return taken

    def _find(self, text: str, seen: int) -> tuple[int, int] | None:
        """Return the start and end of the first stop string that ends beyond ``seen``."""
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, start = min(found)
        return start, end
