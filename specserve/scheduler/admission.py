"""Turns a submission into a request, or says why it cannot be served."""

from __future__ import annotations

import itertools
import random

from specserve.core import MAX_SEED, Capacity, FieldError
from specserve.messages import Submit
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import Skill
from specserve.speculation.state import draft_cap


class Admission:
    """Checks requests and gives each an arrival number and a seed."""

    def __init__(
        self,
        capacity: Capacity,
        eos_token_ids: tuple[int, ...],
        random_seed: int | None,
        no_grammars: str | None,
    ) -> None:
        """``no_grammars``: why requests can't have them, None where they can."""
        self._capacity = capacity
        self._eos_token_ids = eos_token_ids
        self._no_grammars = no_grammars
        self._seeds = random.Random(random_seed)
        self._arrivals = itertools.count()

    def admit(self, message: Submit) -> Request:
        """Raises FieldError for a request that can't be served."""
        params, prompt = message.params, message.token_ids
        self._capacity.check(prompt, params)
        if params.grammar is not None and self._no_grammars is not None:
            raise FieldError("grammar", self._no_grammars)
        room = self._capacity.room
        limit = room if params.max_tokens is None else min(len(prompt) + params.max_tokens, room)
        eos = () if params.ignore_eos else self._eos_token_ids
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
