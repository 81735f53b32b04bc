"""The ``usage`` object of an answer, and what a stream's chunk says of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specserve.core import SpeculationUsage
from specserve.frontend.generation import Generation
from specserve.frontend.output import Answer, Delta


def usage(generation: Generation, return_speculation: bool | None) -> dict[str, Any]:
    """Tokens of all choices; a prompt, with its cached tokens, counts once for all its choices."""
    answers = generation.answers
    firsts = [(job, answer) for job, answer in zip(generation.jobs, answers, strict=True) if job.choice == 0]
    prompt = sum(len(job.prompt) for job, _ in firsts)
    completion = sum(len(answer.token_ids) for answer in answers)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for _, answer in firsts)},
    }
    if predicted := _prediction(generation):
        found["completion_tokens_details"] = predicted
    if return_speculation:
        found["speculation"] = _speculation(answers)
    return found


def _prediction(generation: Generation) -> dict[str, Any] | None:
    """What became of the predicted text, of all choices together; None without one."""
    pairs = zip(generation.jobs, generation.answers, strict=True)
    given = [
        (len(job.params.prediction), answer) for job, answer in pairs if job.params.prediction is not None
    ]
    if not given:
        return None
    accepted = sum(answer.speculation.predicted for _, answer in given)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(size for size, _ in given) - accepted,
    }


def step_runs(delta: Delta) -> dict[str, Any]:
    """How many tokens each step gave: its accepted drafts, the bonus token last. ``pieces`` is each token's text."""
    return {"runs": delta.runs, **({} if delta.pieces is None else {"pieces": delta.pieces})}


def _speculation(answers: Sequence[Answer]) -> dict[str, Any]:
    total = SpeculationUsage(
        steps=sum(answer.speculation.steps for answer in answers),
        drafted=sum(answer.speculation.drafted for answer in answers),
        accepted=sum(answer.speculation.accepted for answer in answers),
    )
    return {
        "steps": total.steps,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "mean_accepted_length": total.mean_accepted_length,
    }
