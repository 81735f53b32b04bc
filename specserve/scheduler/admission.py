"""Turn a submission into a request, or say why it can't be served."""

from __future__ import annotations

import itertools
import random

from specserve.core import MAX_SEED, Capacity, FieldError
from specserve.messages import Submit
from specserve.scheduler.request import Request
from specserve.speculation.control.acceptance import Skill
from specserve.speculation.state import draft_cap


class Admission:
    """Check requests, and give each an arrival number and a seed."""

    def __init__(
        self,
        capacity: Capacity,
        eos_token_ids: tuple[int, ...],
        random_seed: int | None,
        no_grammars: str | None,
    ) -> None:
        """``no_grammars``: why requests can't use grammars; None if they can."""
        self._capacity = capacity
        self._eos_token_ids = eos_token_ids
        self._no_grammars = no_grammars
        self._seeds = random.Random(random_seed)
        self._arrivals = itertools.count()

    def admit(self, message: Submit, submitted: float) -> Request:
        """Return the request, which came at ``submitted``. Raises FieldError if it can't be served."""
        params, prompt = message.params, message.token_ids
        self._capacity.check(prompt, params)
        if params.constrained and self._no_grammars is not None:
            param = "thinking_token_budget" if params.grammar is None else "grammar"
            raise FieldError(param, self._no_grammars)
        if params.thinking_token_budget is not None and params.thought is None:
            raise FieldError(
                "thinking_token_budget", "not supported: the model's reasoning format is unknown"
            )
        room = self._capacity.room
        limit = room if params.max_tokens is None else min(len(prompt) + params.max_tokens, room)
        eos = () if params.ignore_eos else self._eos_token_ids
        stop_ids = frozenset((*eos, *params.stop_token_ids))
        ends = params.thought.end if params.thinking_token_budget is not None and params.thought else ()
        if params.min_tokens and (met := stop_ids.intersection(ends)):
            words = f"token {min(met)} ends both the answer and, at its budget, the thought: it must be 0"
            raise FieldError("min_tokens", f"{words}, found {params.min_tokens}")
        seed = self._seeds.randrange(MAX_SEED) if params.seed is None else params.seed
        return Request(
            rid=message.rid,
            prompt=prompt,
            params=params,
            choice=message.choice,
            seed=seed,
            limit=limit,
            stop_ids=stop_ids,
            arrival=next(self._arrivals),
            skill=Skill.of(draft_cap(params), params),
            submitted=submitted,
            tenant=message.tenant,
            scores=None if params.prompt_logprobs is None else [],
        )
