"""Offline generation with the server's engine, in the caller's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from specserve.config import SETTINGS, Settings, make_settings
from specserve.config.settings import SERVER
from specserve.core import FieldError, SamplingParams, SpeculationUsage, TokenLogprob
from specserve.frontend.answers import Formats
from specserve.frontend.conversation import plain
from specserve.frontend.enforce import Calls
from specserve.frontend.fields import encodable
from specserve.frontend.output import output_processor
from specserve.frontend.parsers.base import Parts, parts
from specserve.frontend.parsers.registry import AnswerParser, choose_format
from specserve.frontend.tokenizer import Tokenizer
from specserve.frontend.tools import Tool, offered
from specserve.messages import Failed, Submit

if TYPE_CHECKING:
    from specserve.process.worker import Engine

log = logging.getLogger(__name__)

_READ = ("requests_all_greedy", "tool_call_parser", "reasoning_parser")
_UNREAD = ("served_model_name",)  # though it is not in the server's group
Message = Mapping[str, Any]
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call: its name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One answer. ``text`` is empty without a tokenizer. ``logprobs`` and ``prompt_logprobs`` are None unless asked
    for; the latter omits the prompt's first token. For ``chat``, the text is also parsed into ``content``,
    ``reasoning_content`` (with ``reasoning_parser``) and ``tool_calls``."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob] | None
    speculation: SpeculationUsage
    prompt_token_ids: list[int]
    cached_tokens: int
    content: str
    reasoning_content: str = ""
    tool_calls: list[FunctionCall] = field(default_factory=list)


class LLM:
    """A model that answers batches of prompts. Settings have the names of the server's flags.

    It takes one call at a time. Raises ValueError naming the setting, prompt or parameter at fault.
    """

    def __init__(self, model_path: str | None = None, **settings: Any) -> None:
        from specserve.process.assemble import create_scheduler, resolve_engine

        given = make_settings(model_path=model_path, **settings)
        for name in _ignored_settings(given):
            log.warning("%s has no effect: only the server reads it", name)
        self.settings, _, config = resolve_engine(given)
        self.tokenizer: Tokenizer | None = None
        if not given.skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(
                str(config.tokenizer_path), given.trust_remote_code, given.chat_template
            )
        self._vocab_size = config.model.vocab_size
        self._ends = config.model.eos_token_ids
        self.engine: Engine | None = create_scheduler(config)
        self._calls = 0
        self._free = threading.Lock()  # while no call runs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one prompt or a list of them, in order. A prompt is text or token ids, and never empty.

        ``sampling_params`` defaults to ``SamplingParams()``, with temperature 0 if ``requests_all_greedy`` is set.
        Parameters given by the caller are not changed: with that setting they must have ``temperature=0``.
        """
        ids = self._encode_each(prompts)
        return self._run(ids, self._params(sampling_params, len(ids)), progress, "prompts[{}]")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, in order, through the model's chat template.

        ``sampling_params`` as for ``generate``; a grammar in them constrains the answer after any reasoning, unless the
        model calls a tool. ``chat_template_kwargs`` are variables that the chat template reads, such as
        ``enable_thinking``. ``tools``, ``tool_choice`` and ``parallel_tool_calls`` are OpenAI's and apply to all
        conversations; calls are returned in ``tool_calls``.
        """
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages must be a list, found {type(messages).__name__}")
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise ValueError(f"chat_template_kwargs must be a dict, found {_kind(chat_template_kwargs)}")
        calls = Calls.of(*offered(tools, tool_choice, parallel_tool_calls))
        formats = self._formats()
        calls.check(formats.calls)
        one = not messages or isinstance(messages[0], Mapping)
        prompts = []
        for index, conversation in enumerate([messages] if one else messages):
            try:
                prompts.append(self._encode_chat(conversation, calls.tools, chat_template_kwargs))
            except ValueError as error:
                raise ValueError(f"{'' if one else f'conversation {index}: '}{error}") from None
        params = self._params(sampling_params, len(prompts))
        parsers = [
            formats.parser(prompt, calls, each.grammar is not None)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        if calls.tools:
            params = [_with_calls(formats, calls, each) for each in params]
        params = [_after_thought(formats, *each) for each in zip(params, parsers, strict=True)]
        return self._run(prompts, params, progress, "conversation {}", parsers)

    def close(self) -> None:
        """Free the engine and its memory. The object can't be used afterwards."""
        if self.engine is not None:
            from specserve.engine.memory import return_memory

            self.engine.close()
            self.engine = None
            return_memory()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode_each(self, prompts: object) -> list[list[int]]:
        if isinstance(prompts, str) or (_is_sequence(prompts) and prompts and isinstance(prompts[0], int)):
            return [self._encode(prompts, "the prompt")]
        if not _is_sequence(prompts):
            raise ValueError(f"prompts must be text, token ids or a list of them, found {_kind(prompts)}")
        return [self._encode(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]

    def _encode(self, prompt: object, where: str) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a prompt of text")
            # A tokenizer may encode an empty text as its BOS token alone, which would not be a prompt.
            ids = tokenizer.encode(_encodable(prompt, where)) if prompt else []
        elif _is_sequence(prompt):
            ids = list(prompt)
            self._check(ids, where)
        else:
            raise ValueError(f"{where} must be text or token ids, found {_kind(prompt)}")
        if not ids:
            raise ValueError(f"{where} must not be empty")
        return ids

    def _check(self, tokens: list[Any], where: str) -> None:
        """Raise ValueError for the first value that is not a token id."""
        last = self._vocab_size - 1
        if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= last:
            return  # three times as fast as a loop; the device waits meanwhile
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= last:
                raise ValueError(f"{where} must hold token ids from 0 to {last}, found {token!r}")

    def _encode_chat(
        self, messages: object, tools: Sequence[Tool], variables: Mapping[str, Any] | None
    ) -> list[int]:
        tokenizer = self._need_tokenizer("chat")
        if not (conversation := plain(messages)):
            raise ValueError("messages must not be empty")
        return tokenizer.encode_chat(conversation, tools=tools, variables=variables)

    def _formats(self) -> Formats:
        """Return how answers are parsed."""
        tokenizer, settings = self._need_tokenizer("chat"), self.settings
        calls, _ = choose_format(settings.tool_call_parser, tokenizer.template_text)
        return Formats.of(tokenizer, calls, settings.reasoning_parser != "none", self._ends)

    def _with_ids(self, params: SamplingParams, where: str) -> SamplingParams:
        """Return ``params`` with a prediction of text replaced by its token ids."""
        if not isinstance(params.prediction, str):
            return params
        tokenizer = self._need_tokenizer("a prediction of text")
        ids = tokenizer.encode_answer(_encodable(params.prediction, f"{where}.prediction"))
        return msgspec.structs.replace(params, prediction=ids)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and skip_tokenizer_init is set")
        return self.tokenizer

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Return the parameters of each prompt."""
        if self.engine is None:
            raise ValueError("this LLM is closed")
        if given is None:
            given = SamplingParams(temperature=0) if self.settings.requests_all_greedy else SamplingParams()
        found = [self._with_ids(each, where) for each, where in _params_each(given, count)]
        if self.tokenizer is None and any(each.stop for each in found):
            raise ValueError("stop needs a tokenizer, and skip_tokenizer_init is set; use stop_token_ids")
        return found

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        progress: bool,
        name: str,
        parsers: Sequence[AnswerParser | None] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts. ``name`` is the format of a prompt's name in errors, used if there are several; ``parsers``
        parse the answers."""
        engine = self.engine
        assert engine is not None, "_params checks this"
        if not self._free.acquire(blocking=False):
            raise RuntimeError("another call is running: an LLM takes one call at a time")
        try:
            self._calls += 1
            batch = _Batch(engine, self.tokenizer, f"call{self._calls}", prompts, params, name, parsers)
            for _ in _progress(batch.run(), len(prompts), progress):
                pass
            return batch.outputs()
        finally:
            self._free.release()


class _Batch:
    """The requests of one call."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        call: str,
        prompts: list[list[int]],
        params: list[SamplingParams],
        name: str,
        parsers: Sequence[AnswerParser | None] | None,
    ) -> None:
        self._engine = engine
        self._name = name
        self._requests = {
            f"{call}-{index}": (prompt, each)
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        }
        self._processors = {
            rid: output_processor(tokenizer, prompt, each, parser)
            for (rid, (prompt, each)), parser in zip(
                self._requests.items(), parsers or [None] * len(prompts), strict=True
            )
        }

    def run(self) -> Iterator[str]:
        """Run until every request has ended, yielding the id of each as it ends. Leaves no request in the engine."""
        open_rids = dict.fromkeys(self._requests)
        try:
            for rid, (prompt, params) in self._requests.items():
                self._engine.submit(Submit(rid, prompt, params))
            while open_rids:
                assert self._engine.has_work, "the engine forgot requests"
                for rid in self._iterate(open_rids):
                    del open_rids[rid]
                    yield rid
        finally:
            for rid in open_rids:
                self._engine.abort(rid)

    def _iterate(self, open_rids: Mapping[str, None]) -> list[str]:
        """Run one iteration of the engine; return the ids of the requests that ended."""
        ended = []
        for message in self._engine.run_once():
            if message.rid not in open_rids or message.rid in ended:
                continue  # sent before the engine read the abort
            if isinstance(message, Failed):
                raise ValueError(self._error_text(message))
            processor = self._processors[message.rid]
            delta = processor.push(message)
            if processor.must_abort:
                self._engine.abort(message.rid)
            if delta.finish_reason is not None:
                ended.append(message.rid)
        return ended

    def _error_text(self, failed: Failed) -> str:
        """Return the error's text, which names the prompt if there are several."""
        named = [self._name.format(list(self._requests).index(failed.rid))] if len(self._requests) > 1 else []
        return ": ".join([*named, *([failed.param] if failed.param else []), failed.message])

    def outputs(self) -> list[RequestOutput]:
        found = []
        for rid, (prompt, params) in self._requests.items():
            answer = self._processors[rid].answer
            apart = parts(answer.events) if self._processors[rid].parsed else Parts(answer.text)
            found.append(
                RequestOutput(
                    text=answer.text,
                    token_ids=answer.token_ids,
                    finish_reason=str(answer.finish_reason),
                    logprobs=None if params.logprobs is None else answer.logprobs,
                    prompt_logprobs=None if params.prompt_logprobs is None else answer.prompt_logprobs,
                    speculation=answer.speculation,
                    prompt_token_ids=prompt,
                    cached_tokens=answer.cached_tokens,
                    content=apart.content,
                    reasoning_content=apart.reasoning,
                    tool_calls=[FunctionCall(*call) for call in apart.calls],
                )
            )
        return found


def _with_calls(formats: Formats, calls: Calls, params: SamplingParams) -> SamplingParams:
    """Return ``params`` with a grammar of tool calls, or of tool calls and the answer without any."""
    if params.grammar is not None:
        calls.check(formats.calls, "grammar")
    try:
        held = formats.held(calls, params.grammar)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError("grammar", str(error)) from None
    return msgspec.structs.replace(params, grammar=held)


def _after_thought(formats: Formats, params: SamplingParams, parser: AnswerParser) -> SamplingParams:
    """Return ``params`` for an answer that may begin with reasoning, which may have a budget."""
    thought, grammar = params.thought, params.grammar
    if thought is None and params.thinking_token_budget is not None and parser.tells_reasoning:
        thought = formats.thought(parser)
    if grammar is not None:
        grammar = formats.after_thought(grammar, parser)
    return msgspec.structs.replace(params, thought=thought, grammar=grammar)


def _ignored_settings(settings: Settings) -> list[str]:
    """Return the server-only settings that were set and have no effect here."""
    names = [name for name, each in SETTINGS.items() if each.group == SERVER or name in _UNREAD]
    return [name for name in names if name not in _READ and getattr(settings, name) != SETTINGS[name].default]


def _is_sequence(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def _kind(given: object) -> str:
    return type(given).__name__


def _encodable(text: str, where: str) -> str:
    if not encodable(text):
        raise ValueError(f"{where} must be text that UTF-8 can encode")
    return text


def _params_each(params: object, count: int) -> list[tuple[SamplingParams, str]]:
    """Return the parameters of each prompt, with their name in errors."""
    if isinstance(params, SamplingParams):
        return [(params, "sampling_params")] * count
    if not _is_sequence(params):
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, found {_kind(params)}")
    if len(params) != count:
        raise ValueError(f"sampling_params must be one or as many as prompts: {count}, found {len(params)}")
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"sampling_params[{index}] must be SamplingParams, found {_kind(each)}")
    return [(each, f"sampling_params[{index}]") for index, each in enumerate(params)]


def _progress(ended: Iterator[str], total: int, show: bool) -> Iterator[str]:
    if not show:
        return ended
    from tqdm import tqdm

    return iter(tqdm(ended, total=total, unit="prompt"))
