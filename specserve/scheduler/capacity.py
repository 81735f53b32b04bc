"""What a request may ask of an engine. The front refuses by these rules before it sends one, and the engine by the
same: torch is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.core import FieldError, SamplingParams, prediction_limit


@dataclass(frozen=True, slots=True)
class Capacity:
    """What bounds a request: the model's context and the pool, both in tokens."""

    context_length: int
    pool_tokens: int
    vocab_size: int
    all_greedy: bool

    @property
    def room(self) -> int:
        """Tokens of a prompt and its answer together, at most."""
        return min(self.context_length, self.pool_tokens)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises FieldError for a request that can't be served. Of a prompt that is too long no token is looked at."""
        if not prompt:
            raise FieldError("prompt", "must not be empty")
        room = self.room - len(prompt)
        if room < 1:
            raise self.too_long("prompt", f"has {len(prompt)} tokens")
        self.check_tokens("prompt", prompt)
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
        """Raises FieldError unless all are in the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:  # there may be millions
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise FieldError(param, f"token ids are from 0 to {self.vocab_size - 1}, found {wrong}")

    def too_long(self, param: str, has: str) -> FieldError:
        short = (
            "the context length" if self.context_length == self.room else "the KV pool (--max-total-tokens)"
        )
        words = f"{has}; {short} is {self.room}, the answer included"
        return FieldError(param, words, "context_length_exceeded")
