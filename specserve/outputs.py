"""The answers that ``LLM`` and ``AsyncLLM`` return, with vLLM's names, and the calls that collect them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specserve.core import SpeculationUsage, TokenLogprob
from specserve.frontend.generation import Job
from specserve.frontend.output import Answer, output_processor
from specserve.frontend.parsers.base import Parts, parts
from specserve.frontend.tokenizer import Tokenizer
from specserve.messages import Failed, Submit, Tokens

if TYPE_CHECKING:
    from specserve.process.local import LocalEngine, Post, Put

_CALLS = itertools.count()  # numbers the calls of all models


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call: its name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt. ``text`` is empty without a tokenizer. ``finish_reason`` is None while it is being
    written. ``stop_reason`` is the stop string that ended it. ``logprobs`` is None unless asked for. For ``chat``, the
    text is also parsed into ``content``, ``reasoning_content`` (with ``reasoning_parser``) and ``tool_calls``."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | None
    logprobs: list[TokenLogprob] | None
    speculation: SpeculationUsage
    content: str
    reasoning_content: str = ""
    tool_calls: list[FunctionCall] = field(default_factory=list)

    @classmethod
    def of(cls, job: Job, answer: Answer) -> CompletionOutput:
        apart = Parts(answer.text) if job.parser is None else parts(answer.events)
        return cls(
            index=job.choice,
            text=answer.text,
            token_ids=[*answer.token_ids],
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop,
            logprobs=None if job.params.logprobs is None else [*answer.logprobs],
            speculation=answer.speculation,
            content=apart.content,
            reasoning_content=apart.reasoning,
            tool_calls=[FunctionCall(*call) for call in apart.calls],
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt; those of the first are also here. ``prompt`` is its text, for ``chat`` as the template
    rendered it, None if it was given as token ids. ``prompt_logprobs`` is None unless asked for, and omits the prompt's
    first token. ``cached_tokens`` of the prompt came from the prefix cache."""

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob] | None
    cached_tokens: int
    outputs: list[CompletionOutput]

    @classmethod
    def of(cls, prompt: str | None, jobs: Sequence[Job], answers: Sequence[Answer]) -> RequestOutput:
        first = answers[0]
        return cls(
            prompt=prompt,
            prompt_token_ids=[*jobs[0].prompt],
            prompt_logprobs=None if jobs[0].params.prompt_logprobs is None else first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
            outputs=[CompletionOutput.of(job, answer) for job, answer in zip(jobs, answers, strict=True)],
        )

    @property
    def finished(self) -> bool:
        """Return whether all answers have ended."""
        return all(each.finish_reason is not None for each in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def speculation(self) -> SpeculationUsage:
        return self.outputs[0].speculation

    @property
    def content(self) -> str:
        return self.outputs[0].content

    @property
    def reasoning_content(self) -> str:
        return self.outputs[0].reasoning_content

    @property
    def tool_calls(self) -> list[FunctionCall]:
        return self.outputs[0].tool_calls


@dataclass(frozen=True, slots=True)
class PromptJobs:
    """A prompt, with its text if there is one, and a job for each answer to it."""

    text: str | None
    jobs: list[Job]


class Collector:
    """Submits the jobs of one call and collects their answers. ``open``: those that have not ended, by id. ``name`` is
    the format of a prompt's name in errors, used if there are several."""

    def __init__(
        self, engine: LocalEngine, tokenizer: Tokenizer | None, prompts: Sequence[PromptJobs], name: str
    ) -> None:
        self._engine = engine
        self._name = name
        self._prompts = prompts
        prefix = f"call{next(_CALLS)}"
        self._outputs = [
            {
                f"{prefix}-{index}-{job.choice}": output_processor(
                    tokenizer, job.prompt, job.params, job.parser
                )
                for job in each.jobs
            }
            for index, each in enumerate(prompts)
        ]
        self.open = {rid: output for outputs in self._outputs for rid, output in outputs.items()}

    def begin(self, put: Put, post: Post | None = None) -> None:
        """Submit the jobs. ``put`` gets what ``push`` takes, as in ``LocalEngine.submit``."""
        jobs = [job for each in self._prompts for job in each.jobs]
        submits = [
            Submit(rid, list(job.prompt), job.params, job.choice)
            for rid, job in zip(self.open, jobs, strict=True)
        ]
        self._engine.submit(submits, put, post)

    def push(self, message: Tokens | Failed) -> bool:
        """Add a message, and return whether it ends an answer. Raises ValueError or RuntimeError for a failure."""
        output = self.open.get(message.rid)
        if output is None:
            return False  # sent before the engine read the abort
        if isinstance(message, Failed):
            raise (ValueError if message.fault == "request" else RuntimeError)(self._error_text(message))
        delta = output.push(message)
        if output.must_abort:
            self._engine.abort(message.rid)
        if delta.finish_reason is None:
            return False
        del self.open[message.rid]
        return True

    def output(self, index: int) -> RequestOutput:
        """Return the answers to a prompt so far."""
        prompt, outputs = self._prompts[index], self._outputs[index].values()
        return RequestOutput.of(prompt.text, prompt.jobs, [each.answer for each in outputs])

    def close(self) -> None:
        """End the jobs that have not ended."""
        for rid in self.open:
            self._engine.abort(rid)

    def _error_text(self, failed: Failed) -> str:
        """Return the error's text, which names the prompt if there are several."""
        index = int(failed.rid.split("-")[1])
        named = [self._name.format(index)] if len(self._prompts) > 1 else []
        return ": ".join([*named, *([failed.param] if failed.param else []), failed.message])
