"""Turns a submission into a request, or says why it cannot be served."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from specserve.core import MAX_SEED, prediction_limit
from specserve.messages import Submit
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import Skill
from specserve.speculation.state import draft_cap


class Refused(Exception):
    """The request is the client's mistake; ``param`` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Capacity:
    """What bounds a request: the model's context and the pool, both in tokens."""

    context_length: int
    pool_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    all_greedy: bool


class Admission:
    """Checks requests and gives each an arrival number and a seed."""

    def __init__(self, capacity: Capacity, random_seed: int | None) -> None:
        self._capacity = capacity
        self._seeds = random.Random(random_seed)
        self._arrivals = itertools.count()

    def admit(self, message: Submit) -> Request:
        """Raises Refused."""
        params, prompt = message.params, message.token_ids
        self._check(message)
        room = min(self._capacity.context_length, self._capacity.pool_tokens)
        limit = room if params.max_tokens is None else min(len(prompt) + params.max_tokens, room)
        eos = () if params.ignore_eos else self._capacity.eos_token_ids
        seed = self._seeds.randrange(MAX_SEED) if params.seed is None else params.seed
        return Request(
            rid=message.rid,
            prompt=prompt,
            params=params,
            choice=message.choice,
            seed=seed,
            limit=limit,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            arrival=next(self._arrivals),
            skill=Skill(draft_cap(params), predicted=bool(params.prediction)),
            scores=None if params.prompt_logprobs is None else [],
        )

    def _check(self, message: Submit) -> None:
        capacity, params, prompt = self._capacity, message.params, message.token_ids
        if not prompt:
            raise Refused("the prompt has no tokens; it needs at least one", "prompt")
        if len(prompt) >= capacity.context_length:
            raise Refused(
                f"the prompt has {len(prompt)} tokens; with a context length of {capacity.context_length} it may have "
                f"{capacity.context_length - 1} at most",
                "prompt",
            )
        if len(prompt) >= capacity.pool_tokens:
            raise Refused(
                f"the prompt has {len(prompt)} tokens; the KV pool (max_total_tokens) holds {capacity.pool_tokens}",
                "prompt",
            )
        room = min(capacity.context_length, capacity.pool_tokens) - len(prompt)
        if params.min_tokens > room:
            raise Refused(
                f"there is room for {room} tokens after the prompt, found min_tokens {params.min_tokens}",
                "min_tokens",
            )
        predicted = params.prediction or ()
        assert not isinstance(predicted, str), "the front tokenizes predictions"
        if len(predicted) > (most := prediction_limit(capacity.context_length)):
            raise Refused(f"prediction has {len(predicted)} tokens; it may have {most} at most", "prediction")
        named = {
            "prompt": prompt,
            "logit_bias": params.logit_bias or (),
            "stop_token_ids": params.stop_token_ids,
            "prediction": predicted,
        }
        for param, tokens in named.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < capacity.vocab_size:
                bad = next(token for token in tokens if not 0 <= token < capacity.vocab_size)
                raise Refused(
                    f"{param} holds token id {bad}; ids run from 0 to {capacity.vocab_size - 1}", param
                )
        if capacity.all_greedy and not params.greedy:
            raise Refused(
                f"this server serves greedy requests only (requests_all_greedy): temperature must be 0, "
                f"found {params.temperature}",
                "temperature",
            )
