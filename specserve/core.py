"""Core data types: sampling parameters, capacity limits and speculation counters.

Plain data; other modules act on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5  # below it, logits / temperature overflows float32
MAX_BIAS = 512  # entries of a request's bias list on the device: logit_bias plus tokens banned by min_tokens
MAX_ENTRIES = MAX_BIAS - 16  # of logit_bias and stop_token_ids; the rest is for the model's end tokens
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**62  # counts of tokens, summed in int64
MAX_CHOICES = 128  # answers to one prompt
MAX_PREDICTION = 8192  # tokens of a predicted text: each running request has room for this many on the device
BIAS = 100  # largest absolute value of logit_bias
# Minimum and maximum of a parameter, and whether the minimum itself is refused.
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
    """Report a request field at fault. ``param`` is its path, such as ``messages.2.content``; ``code`` is OpenAI's code
    for the error, if there is one. ``preface`` begins the message."""

    def __init__(self, param: str, reason: str, code: str | None = None, preface: str = "") -> None:
        super().__init__(param, reason, code, preface)  # what pickle calls it with
        self.param = param
        self.reason = reason
        self.code = code
        self.preface = preface

    def __str__(self) -> str:
        return f"{self.preface}{self.param}: {self.reason}"


@cache
def _kinds(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct)


def _check_types(struct: msgspec.Struct, prefix: str = "") -> None:
    """Raise ValueError naming the first field whose value has the wrong type."""
    for name, kind in _kinds(type(struct)).items():
        value = getattr(struct, name)
        # ``convert`` would accept a dictionary as a struct.
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
    """Return the maximum length of a predicted text, in tokens."""
    return min(context_length, MAX_PREDICTION)


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Control drafting for one request. ``max_draft_tokens`` limits the nodes drafted for it in one step."""

    enabled: bool = True
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_types(self, "speculation.")
        if self.max_draft_tokens is not None:
            _check_range("speculation.max_draft_tokens", self.max_draft_tokens, 0, MAX_COUNT)


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """The marks of a model's reasoning: it stands between the texts ``open`` and ``close``. ``begun``: the prompt
    already ends in ``open``. ``end``: the tokens that end the reasoning when its budget is used up."""

    open: str
    close: str
    end: list[int]
    begun: bool = False


_GRAMMAR = "use grammar, with a function of specserve.grammar"
_NO_BEAMS = "there is no beam search"
_ELSEWHERE = {
    "allowed_token_ids": _GRAMMAR,
    "bad_words": "use grammar=specserve.grammar.without([...])",
    "best_of": "answers are not ranked; n returns several",
    "detokenize": "use the setting skip_tokenizer_init",
    "early_stopping": _NO_BEAMS,
    "ebnf": _GRAMMAR,
    "guided_decoding": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "length_penalty": _NO_BEAMS,
    "logits_processors": "no code of the caller runs between steps; use logit_bias or grammar",
    "max_completion_tokens": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "no_stop_trim": "use include_stop_str_in_output",
    "output_kind": "LLM returns whole answers, AsyncLLM yields the answer so far",
    "regex": _GRAMMAR,
    "response_format": _GRAMMAR,
    "return_logprob": "use logprobs",
    "sampling_seed": "use seed",
    "structured_outputs": _GRAMMAR,
    "top_logprobs": "use logprobs",
    "top_logprobs_num": "use logprobs",
    "truncate_prompt_tokens": "prompts are not cut",
    "use_beam_search": _NO_BEAMS,
}
"""Parameters of OpenAI, vLLM and SGLang, and what to do instead."""


class _Parameters(type(msgspec.Struct)):  # type: ignore[misc]
    """Makes and checks ``SamplingParams``; says what to use instead of a parameter that others have. The engine
    trusts what it decodes: the front made it."""

    def __call__(cls, *values: Any, **named: Any) -> Any:
        for name in named.keys() & _ELSEWHERE:
            raise TypeError(f"{cls.__name__} has no {name}: {_ELSEWHERE[name]}")
        params = super().__call__(*values, **named)
        params.check()
        return params


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=_Parameters):
    """Sampling parameters and end conditions of a request. The names are OpenAI's and vLLM's.

    Raises ValueError naming the parameter and the accepted values; a value assigned later is checked by the next call
    of ``LLM``.
    ``n`` is the number of answers. ``stop`` may be one text, or None. ``max_tokens`` None generates up to the context
    length, 0 runs only the prompt. A ``temperature`` below 1e-5 is greedy. ``seed`` None draws a random one. ``top_k``
    0 or -1 and ``top_p`` 1 are off. ``logprobs`` is the number of alternatives reported with each token (0: only the
    token's own); ``prompt_logprobs`` is the same for the prompt's tokens, which are then recomputed even if cached.
    ``skip_special_tokens`` False keeps special tokens in the text. ``include_stop_str_in_output`` keeps the stop string
    or token that ended the answer in its text. ``prediction`` is the expected answer, as text or token ids: it is tried
    as drafts and never changes the answer. ``grammar`` constrains the answer; the functions of ``specserve.grammar``
    make one. ``thinking_token_budget`` limits the tokens of reasoning before its end mark is written; the server and
    ``LLM.chat`` fill in ``thought``, its marks. ``priority``: lower values start first; the running request with the
    highest value is preempted first.
    """

    n: int = 1
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
    stop: Sequence[str] = []
    stop_token_ids: Sequence[int] = []
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

    def check(self) -> None:
        """Raise ValueError for a value that is not accepted. A ``stop`` of one text becomes a list."""
        self.stop = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        _check_types(self)
        _check_range("n", self.n, 1, MAX_CHOICES)
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
        """Return whether a grammar or a thinking budget may restrict the tokens."""
        return self.grammar is not None or self.thinking_token_budget is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits on a request: the model's context and the KV pool, both in tokens. The front and the engine check them."""

    context_length: int
    pool_tokens: int
    vocab_size: int
    all_greedy: bool

    @property
    def room(self) -> int:
        """Return the maximum number of tokens of a prompt and its answer together."""
        return min(self.context_length, self.pool_tokens)

    def check(self, prompt: Sequence[int], params: SamplingParams, param: str = "prompt") -> None:
        """Raise FieldError, with the prompt called ``param``, for a request that can't be served. The tokens of a
        prompt that is too long are not inspected."""
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
            raise FieldError("prediction", f"has {len(predicted)} tokens; the limit is {most}")
        self.check_tokens("prediction", predicted)
        self.check_tokens("logit_bias", list(params.logit_bias or ()))
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        if params.thought is not None:
            if not params.thought.end:
                raise FieldError("thought.end", "must not be empty")
            self.check_tokens("thought.end", params.thought.end)
        if self.all_greedy and not params.greedy:
            words = "this server accepts only greedy requests (requests_all_greedy): it must be 0"
            raise FieldError("temperature", f"{words}, found {params.temperature}")

    def check_tokens(self, param: str, tokens: Sequence[int]) -> None:
        """Raise FieldError unless all are in the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:  # there may be millions
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise FieldError(param, f"token ids must be from 0 to {self.vocab_size - 1}, found {wrong}")

    def too_long(self, param: str, has: str) -> FieldError:
        """Return the error for a prompt that is too long. Clients learn the length from OpenAI's words."""
        short = (
            "the context length" if self.context_length == self.room else "the KV pool (--max-total-tokens)"
        )
        words = f"{has}; {short} is {self.room}, the answer included"
        preface = f"This model's maximum context length is {self.room} tokens. "
        return FieldError(param, words, "context_length_exceeded", preface)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of a token under the raw logits, with the most likely alternatives."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class SpeculationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation counters of one request.

    ``steps`` counts target forwards that emitted tokens, without prefill; ``drafted`` the verified nodes other than
    roots; ``accepted`` the drafted nodes that were emitted, without bonus tokens; ``predicted`` the tokens of its
    prediction that were emitted in place, each after those before it.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0

    @property
    def mean_accepted_length(self) -> float:
        """Return the tokens emitted per step, bonus token included; 0 if there was no step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0
