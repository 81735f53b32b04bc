"""The nouns of the server: what a request asks for and what the engine answers.

Plain data. Each piece of state is changed by one function elsewhere; nothing here acts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5  # below it logits / temperature leave float32
MAX_BIAS = 512  # entries of a request's bias list on the device: logit_bias plus tokens banned by min_tokens
MAX_ENTRIES = MAX_BIAS - 16  # of logit_bias and stop_token_ids; the rest is for the model's end tokens
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**62  # counts of tokens, summed in int64
MAX_PREDICTION = 8192  # tokens of a predicted text: each running request has room for this many on the device
BIAS = 100  # the greatest value of logit_bias
# Least and greatest value of a parameter, and whether the least itself is refused.
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False),
    "top_p": (0, 1, True),
    "top_k": (-1, MAX_COUNT, False),
    "min_p": (0, 1, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0.01, 100, False),
}


class FieldError(ValueError):
    """A field is at fault: ``param`` names it, as in ``messages.2.content``. ``code`` is OpenAI's, if it has one.
    ``preface``: what is said before."""

    def __init__(self, param: str, reason: str, code: str | None = None, preface: str = "") -> None:
        super().__init__(f"{preface}{param}: {reason}")
        self.param = param
        self.reason = reason
        self.code = code
        self.preface = preface


@cache
def _kinds(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct)


def _check_types(struct: msgspec.Struct, prefix: str = "") -> None:
    """Raise ValueError naming the first field whose value is not of its type."""
    for name, kind in _kinds(type(struct)).items():
        value = getattr(struct, name)
        # ``convert`` would take a dictionary for a struct's fields.
        if isinstance(value, dict) and isinstance(kind, type):
            raise ValueError(f"{prefix}{name}: expected `{kind.__name__}`, got `dict`")
        try:
            msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"{prefix}{name}: {str(error).lower()}") from None


def _check_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    inside = low < value <= high if open_low else low <= value <= high
    if not inside or not math.isfinite(value):
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], found {value}")


def prediction_limit(context_length: int) -> int:
    """Most tokens that a predicted text may have."""
    return min(context_length, MAX_PREDICTION)


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Per-request control of drafting. ``max_draft_tokens`` bounds the nodes drafted for it in one step."""

    enabled: bool = True
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_types(self, "speculation.")
        if self.max_draft_tokens is not None:
            _check_range("speculation.max_draft_tokens", self.max_draft_tokens, 0, MAX_COUNT)


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes a thought: between the marks ``open`` and ``close``, the first of which the prompt may have
    written (``begun``). ``end``: the tokens that end it where its budget is used up."""

    open: str
    close: str
    end: list[int]
    begun: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's tokens are chosen and when it ends. The names are OpenAI's and vLLM's.

    Raises ValueError naming the parameter and the accepted values. ``max_tokens`` None means up to the context
    length, 0 runs the prompt alone; a temperature below 1e-5 is greedy; ``seed`` None draws one; ``top_k`` 0 or -1
    and ``top_p`` 1 are off; ``logprobs`` is the number of alternatives reported with each token (0: the token's own
    only), ``prompt_logprobs`` the same for the prompt's tokens, which are then computed anew, cached or not;
    ``skip_special_tokens`` False writes special tokens as text; ``include_stop_str_in_output`` keeps what ended the
    answer, stop string or token, in its text; ``prediction`` is what the answer is expected to be, text or token
    ids: it is tried as drafts and changes no token; ``grammar`` is what the answer must be, as the functions of
    ``specserve.grammar`` give it; ``thinking_token_budget`` is how many tokens a thought may have before its end mark
    is written, and ``thought`` what marks it, which the server and ``LLM.chat`` fill in; of those that wait the lowest
    ``priority`` gets a place first, and of those that run the highest gives its place up first.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculation: Speculation = Speculation()
    prediction: str | list[int] | None = None
    grammar: str | None = None
    thinking_token_budget: int | None = None
    thought: Thought | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        _check_types(self)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, MAX_COUNT)
        most = MAX_COUNT if self.max_tokens is None else self.max_tokens
        _check_range("min_tokens", self.min_tokens, 0, most)
        for name, (low, high, open_low) in RANGES.items():
            _check_range(name, getattr(self, name), low, high, open_low)
        for token, bias in (self.logit_bias or {}).items():
            _check_range(f"logit_bias[{token}]", bias, -BIAS, BIAS)
        if self.thinking_token_budget is not None:
            _check_range("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT)
        if self.seed is not None:
            _check_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _check_range("priority", self.priority, -MAX_COUNT, MAX_COUNT)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        entries = {"logit_bias": len(self.logit_bias or {}), "stop_token_ids": len(self.stop_token_ids)}
        if (found := sum(entries.values())) > MAX_ENTRIES:
            names = [name for name, count in entries.items() if count]
            together = " together" if len(names) > 1 else ""
            raise ValueError(f"{' and '.join(names)}: at most {MAX_ENTRIES} entries{together}, found {found}")
        for name in ("min_tokens", "ignore_eos"):
            if self.grammar is not None and getattr(self, name):
                raise ValueError(f"{name}: an answer with a grammar ends where the grammar says")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")

    @property
    def constrained(self) -> bool:
        """Whether something but the model may say which tokens come next."""
        return self.grammar is not None or self.thinking_token_budget is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Capacity:
    """What bounds a request: the model's context and the pool, both in tokens.

    The front refuses by these rules before it sends a request, and the engine by the same."""

    context_length: int
    pool_tokens: int
    vocab_size: int
    all_greedy: bool

    @property
    def room(self) -> int:
        """Tokens of a prompt and its answer together, at most."""
        return min(self.context_length, self.pool_tokens)

    def check(self, prompt: Sequence[int], params: SamplingParams, param: str = "prompt") -> None:
        """Raise FieldError, which calls the prompt ``param``, for a request that can't be served. Of a prompt that is
        too long no token is looked at."""
        if not prompt:
            raise FieldError(param, "must not be empty")
        room = self.room - len(prompt)
        if room < 1:
            raise self.too_long(param, f"has {len(prompt)} tokens")
        self.check_tokens(param, prompt)
        if params.min_tokens > room:
            raise FieldError("min_tokens", f"there is room for {room} tokens, found {params.min_tokens}")
        predicted = params.prediction or ()
        assert not isinstance(predicted, str), "the front tokenizes predictions"
        if len(predicted) > (most := prediction_limit(self.context_length)):
            raise FieldError("prediction", f"has {len(predicted)} tokens; it may have {most} at most")
        self.check_tokens("prediction", predicted)
        self.check_tokens("logit_bias", list(params.logit_bias or ()))
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        if self.all_greedy and not params.greedy:
            words = "this server serves greedy requests only (requests_all_greedy): it must be 0"
            raise FieldError("temperature", f"{words}, found {params.temperature}")

    def check_tokens(self, param: str, tokens: Sequence[int]) -> None:
        """Raise FieldError unless all are in the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:  # there may be millions
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise FieldError(param, f"token ids are from 0 to {self.vocab_size - 1}, found {wrong}")

    def too_long(self, param: str, has: str) -> FieldError:
        """Begin with OpenAI's words, by which clients know it and learn the length."""
        short = (
            "the context length" if self.context_length == self.room else "the KV pool (--max-total-tokens)"
        )
        words = f"{has}; {short} is {self.room}, the answer included"
        preface = f"This model's maximum context length is {self.room} tokens. "
        return FieldError(param, words, "context_length_exceeded", preface)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of a chosen or a prompt's token under the raw logits, with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class SpeculationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What speculation did for one request.

    ``steps`` counts target forwards that emitted tokens, prefill not counted; ``drafted`` the nodes verified
    besides roots; ``accepted`` those that were emitted, bonus tokens not counted; ``predicted`` the
    tokens of its prediction that were emitted, each in its place after those before it.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per step, the bonus token included. 0 when there was no step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0
