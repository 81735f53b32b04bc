"""Measure acceptance on a few prompts and check that drafting changes no text, by running them both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specserve.config.engine import EngineConfig
from specserve.core import SamplingParams, Speculation, SpeculationUsage
from specserve.frontend.tokenizer import Tokenizer
from specserve.messages import Failed, Submit
from specserve.scheduler.scheduler import Scheduler
from specserve.tools.check.report import Acceptance, CheckReport
from specserve.tools.files import read_text

PROMPTS = (
    "List 3 countries and their capitals.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 times 23? Think step by step.",
    "Translate into French: Where is the next railway station?",
    "Summarize: The meeting was moved from Monday to Wednesday because the room is painted on Monday.",
)
USELESS = 1.1  # tokens per step below which drafting costs more than it saves


@dataclass(slots=True)
class GreedyAnswer:
    """One answer. ``runs``: tokens of each step; the first entry is the token from prefill."""

    tokens: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    usage: SpeculationUsage = field(default_factory=SpeculationUsage)


def read_prompts(path: Path | None) -> list[str]:
    """Return the prompts of a file, or the default ones. Raises ValueError naming the file."""
    if path is None:
        return list(PROMPTS)
    lines = [line for line in read_text("--prompts", path).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts: {path} contains no prompt")
    return lines


def measure(
    engine: Scheduler,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    prompts: Sequence[str],
    max_tokens: int,
    report: CheckReport,
) -> None:
    """Add acceptance, and problems with it, to the report. Raises ValueError for a prompt that can't be answered."""
    longest, vocab = max(1, config.context_length // 2), config.model.vocab_size
    if tokenizer is not None:  # with the chat template, if there is one
        encoded = [_ids(tokenizer, prompt)[-longest:] for prompt in prompts]
    else:  # arbitrary ids
        ids = range(min(16, longest))
        encoded = [[(7 * i + 11 * k + 1) % vocab for k in ids] for i in range(len(prompts))]
    with_drafts = _answers(engine, encoded, max_tokens, drafting=True)
    without = _answers(engine, encoded, max_tokens, drafting=False)
    same = sum(one.tokens == other.tokens for one, other in zip(with_drafts, without, strict=True))
    report.acceptance = found = _summary(with_drafts, same)
    if config.draft is not None and found.tokens_per_step < USELESS:
        report.problems.append(
            f"{found.tokens_per_step:.2f} tokens a step: the draft does not fit the model or these prompts, so "
            "drafting only costs time"
        )
    said = f"{found.prompts - same} of {found.prompts} texts differ without drafting"
    if same < found.prompts and config.dtype == "float64":
        report.problems.append(f"{said}, in float64: this is a bug in the server, please report it")
    elif same < found.prompts:
        report.remarks.append(
            f"{said}: in {config.dtype} rounding decides between nearly equal logits; check with --dtype float64"
        )


def _ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    try:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    except ValueError:
        return tokenizer.encode(prompt)


def _answers(
    engine: Scheduler, prompts: Sequence[Sequence[int]], max_tokens: int, drafting: bool
) -> list[GreedyAnswer]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, speculation=Speculation(enabled=drafting))
    answers = {f"{drafting}-{index}": GreedyAnswer() for index in range(len(prompts))}
    for rid, prompt in zip(answers, prompts, strict=True):
        engine.submit(Submit(rid, list(prompt), params))
    while engine.has_work:
        for message in engine.run_once():
            if isinstance(message, Failed):
                raise ValueError(f"a prompt can't be answered: {message.message}")
            answer = answers[message.rid]
            answer.tokens += message.token_ids
            answer.runs += message.runs
            answer.usage = message.speculation or answer.usage
    return list(answers.values())


def _summary(answers: Sequence[GreedyAnswer], same: int) -> Acceptance:
    runs = [run for answer in answers for run in answer.runs[1:]]
    steps, accepted = (sum(getattr(a.usage, name) for a in answers) for name in ("steps", "accepted"))
    return Acceptance(
        prompts=len(answers),
        steps=steps,
        drafted=sum(answer.usage.drafted for answer in answers),
        accepted=accepted,
        tokens_per_step=(accepted + steps) / steps if steps else 1.0,
        by_position=[sum(run > k for run in runs) / len(runs) for k in range(1, max(runs, default=0))],
        same_texts=same,
    )
