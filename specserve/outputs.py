"""The answers that ``LLM`` and ``AsyncLLM`` return. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specserve.core import SpeculationUsage, TokenLogprob
from specserve.frontend.generation import Job
from specserve.frontend.output import Answer
from specserve.frontend.parsers.base import Parts, parts


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
