"""Offline generation with the server's engine, in the caller's process."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import msgspec

from specserve.config import SETTINGS, Settings, make_settings
from specserve.config.settings import SERVER
from specserve.core import SamplingParams
from specserve.frontend.answers import Form, Formats
from specserve.frontend.conversation import plain, turn
from specserve.frontend.fields import encodable
from specserve.frontend.generation import Job
from specserve.frontend.parsers.registry import choose_format
from specserve.frontend.tokenizer import Tokenizer
from specserve.frontend.tools import Calls
from specserve.messages import Failed, Tokens
from specserve.outputs import Collector, PromptJobs, RequestOutput
from specserve.process.spares import Spares

if TYPE_CHECKING:
    from specserve.process.local import LocalEngine
    from specserve.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

_READ = ("requests_all_greedy", "tool_call_parser", "reasoning_parser")
_UNREAD = ("served_model_name",)  # though it is not in the server's group
_KEYWORDS = {declared.flag: declared.name for declared in SETTINGS.values()}
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class _Model:
    """What ``LLM`` and ``AsyncLLM`` share: an engine in a thread of this process, and how requests are planned."""

    def __init__(self, model_path: str | None = None, **settings: Any) -> None:
        given = make_settings(**({} if model_path is None else {"model_path": model_path}), **settings)
        for name in _ignored_settings(given):
            log.warning("%s has no effect: only the server reads it", name)
        try:
            with Spares(given.tensor_parallel_size) as spares:
                self._load(given, spares)
        except ValueError as error:
            error.args = (re.sub("--[a-z-]+", lambda flag: _KEYWORDS.get(flag[0], flag[0]), str(error)),)
            raise

    def _load(self, given: Settings, spares: Spares) -> None:
        from specserve.process.assemble import resolve_engine
        from specserve.process.local import LocalEngine
        from specserve.process.worker import load_engine

        self.settings, _, config = resolve_engine(given)
        self._vocab_size = config.model.vocab_size
        self._ends = config.model.eos_token_ids
        self._defaults = config.request_defaults
        self._planning = threading.Lock()  # a tokenizer encodes for one thread at a time
        self.tokenizer: Tokenizer | None = None
        engine = LocalEngine(partial(load_engine, config, spares))
        try:
            if not given.skip_tokenizer_init:
                self.tokenizer = Tokenizer.load(
                    str(config.tokenizer_path), given.trust_remote_code, given.chat_template
                )
            engine.wait()
        except BaseException:
            engine.close()
            raise
        self._engine: LocalEngine | None = engine

    @property
    def engine(self) -> Scheduler | None:
        return None if self._engine is None else self._engine.idle

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, as Transformers loaded it."""
        return self._need_tokenizer("get_tokenizer").wrapped

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls that give none: those that the setting ``sampling_defaults`` asks for, with
        temperature 0 if ``requests_all_greedy`` is set."""
        return SamplingParams(**self._defaults)

    def close(self) -> None:
        """End the requests that run, and free the engine and its memory. The object can't be used afterwards."""
        if (engine := self._engine) is not None:
            from specserve.engine.memory import return_memory

            engine.close()
            self._engine = None
            return_memory()

    def _plan(self, prompts: object, sampling_params: Params) -> list[PromptJobs]:
        """Return the requests of prompts, or of one."""
        with self._planning:
            texts = self._texts(prompts)
            params = self._params(sampling_params, len(texts))
            return [
                PromptJobs(text, [Job(ids, each, choice) for choice in range(each.n)])
                for (text, ids), each in zip(texts, params, strict=True)
            ]

    def _plan_chat(
        self,
        messages: object,
        sampling_params: Params,
        chat_template: str | None,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        parallel_tool_calls: bool | None,
        ends: tuple[bool | None, bool],
    ) -> list[PromptJobs]:
        """Return the requests of conversations, or of one. ``ends``: as ``turn`` takes them."""
        if isinstance(messages, str):
            raise ValueError(
                'messages must be a list of messages such as [{"role": "user", "content": "..."}]'
            )
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages must be a list, found {type(messages).__name__}")
        if not isinstance(chat_template, str | None):
            raise ValueError(f"chat_template must be text, found {_kind(chat_template)}")
        if not isinstance(variables, Mapping | None):
            raise ValueError(f"chat_template_kwargs must be a dict, found {_kind(variables)}")
        calls = Calls.read(tools, tool_choice, parallel_tool_calls)
        with self._planning:
            tokenizer = self._need_tokenizer("chat")
            if chat_template is not None:
                tokenizer = tokenizer.with_template(chat_template)
            formats = self._formats(tokenizer)
            calls.check(formats.calls)
            one = not messages or isinstance(messages[0], Mapping)
            texts = []
            for index, conversation in enumerate([messages] if one else messages):
                try:
                    texts.append(_render(tokenizer, conversation, calls, variables, ends))
                except ValueError as error:
                    raise ValueError(f"{'' if one else f'conversation {index}: '}{error}") from None
            params = self._params(sampling_params, len(texts))
            return [
                _chat_request(formats, calls, text, tokenizer.encode_answer(text), each)
                for text, each in zip(texts, params, strict=True)
            ]

    def _texts(self, prompts: object) -> list[tuple[str | None, list[int]]]:
        """Return text and token ids of each prompt."""
        prompts = _listed(prompts)
        if isinstance(prompts, str | Mapping) or (
            _is_sequence(prompts) and prompts and isinstance(_value(prompts[0]), int)
        ):
            return [self._text(prompts, "the prompt")]
        if not _is_sequence(prompts):
            raise ValueError(f"prompts must be text, token ids or a list of them, found {_kind(prompts)}")
        return [self._text(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]

    def _text(self, prompt: object, where: str) -> tuple[str | None, list[int]]:
        prompt = _of_dict(prompt, where) if isinstance(prompt, Mapping) else _listed(prompt)
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer("a prompt of text")
            # A tokenizer may encode an empty text as its BOS token alone, which would not be a prompt.
            text, ids = prompt, tokenizer.encode(_encodable(prompt, where)) if prompt else []
        elif _is_sequence(prompt):
            text, ids = None, self._token_ids(prompt, where)
        else:
            raise ValueError(f"{where} must be text or token ids, found {_kind(prompt)}")
        if not ids:
            raise ValueError(f"{where} must not be empty")
        return text, ids

    def _token_ids(self, given: Sequence[Any], where: str) -> list[int]:
        """Return token ids as plain integers. Raises ValueError for the first value that is none."""
        last = self._vocab_size - 1
        if not given or (set(map(type, given)) == {int} and min(given) >= 0 and max(given) <= last):
            return list(given)  # three times as fast as a loop; the device waits meanwhile
        ids = [_value(token) for token in given]
        for token in ids:
            if type(token) is not int or not 0 <= token <= last:
                raise ValueError(f"{where} must hold token ids from 0 to {last}, found {token!r}")
        return ids

    def _formats(self, tokenizer: Tokenizer) -> Formats:
        """Return how answers are parsed."""
        calls, _ = choose_format(self.settings.tool_call_parser, tokenizer.template_text)
        formats = Formats.of(tokenizer, calls, self.settings.reasoning_parser)
        return replace(formats, ends=self._ends, vocab_size=self._vocab_size)

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

    def _params(self, given: Params, count: int) -> list[SamplingParams]:
        """Return the parameters of each prompt."""
        if given is None:
            given = self.get_default_sampling_params()
        found = [self._with_ids(each, where) for each, where in _params_each(given, count)]
        if self.tokenizer is None and any(each.stop for each in found):
            raise ValueError("stop needs a tokenizer, and skip_tokenizer_init is set; use stop_token_ids")
        return found

    def _call(self, prompts: Sequence[PromptJobs], name: str) -> Collector:
        if self._engine is None:
            raise ValueError(f"this {type(self).__name__} is closed")
        return Collector(self._engine, self.tokenizer, prompts, name)


class LLM(_Model):
    """A model that answers batches of prompts. Settings have the names of the server's flags.

    Several threads may call it at a time: their requests run together. Raises ValueError naming the setting, prompt or
    parameter at fault, and RuntimeError if the engine failed.
    """

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, in order. A prompt is text, token ids (a list or an array), or a dict with the
        key ``prompt`` or ``prompt_token_ids``, and never empty. ``use_tqdm`` shows a progress bar.

        ``sampling_params`` defaults to ``get_default_sampling_params()``. Parameters given by the caller are not
        changed: with ``requests_all_greedy`` they must have ``temperature=0``.
        """
        return self._run(self._plan(prompts, sampling_params), use_tqdm, "prompts[{}]")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = False,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, in order, through the model's chat template.

        ``sampling_params`` and ``use_tqdm`` as for ``generate``; a grammar constrains the answer after any reasoning,
        unless the model calls a tool. ``chat_template``, a text or a file, is used instead of the model's.
        ``chat_template_kwargs`` are variables that it reads, such as ``enable_thinking``. ``tools``, ``tool_choice``
        and ``parallel_tool_calls`` are OpenAI's and apply to all conversations; calls are returned in ``tool_calls``.
        With ``continue_final_message`` the answer continues the last message, which is the assistant's; with
        ``add_generation_prompt`` false the assistant's turn is not begun.
        """
        asked = chat_template, chat_template_kwargs, tools, tool_choice, parallel_tool_calls
        ends = add_generation_prompt, continue_final_message
        requests = self._plan_chat(messages, sampling_params, *asked, ends)
        return self._run(requests, use_tqdm, "conversation {}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, requests: list[PromptJobs], use_tqdm: bool, name: str) -> list[RequestOutput]:
        call, arrived = self._call(requests, name), SimpleQueue[Tokens | Failed]()
        with closing(call), _progress(len(call.open), use_tqdm) as ended:
            call.begin(arrived.put)
            while call.open:
                if call.push(arrived.get()):
                    ended()
        return [call.output(index) for index in range(len(requests))]


class AsyncLLM(_Model):
    """A model that answers many requests at a time, for asyncio: any number of tasks may call it. Settings have the
    names of the server's flags, and loading blocks, so that a running event loop calls it in a thread:
    ``await asyncio.to_thread(AsyncLLM, ...)``. Errors are those of ``LLM``."""

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt. Yields the answer so far whenever there is more of it; the last is ``finished``. Leaving the
        loop early, or cancelling the task, ends the request."""
        return self._stream(partial(self._plan, prompt, sampling_params))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, as ``generate`` does a prompt. Parameters are those of ``LLM.chat``."""
        asked = chat_template, chat_template_kwargs, tools, tool_choice, parallel_tool_calls
        ends = add_generation_prompt, continue_final_message
        return self._stream(partial(self._plan_chat, messages, sampling_params, *asked, ends))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def _stream(self, plan: Callable[[], list[PromptJobs]]) -> AsyncGenerator[RequestOutput, None]:
        requests = await asyncio.to_thread(plan)
        if len(requests) != 1:
            raise ValueError(f"one prompt at a time; found {len(requests)}: start a task for each")
        call, arrived = self._call(requests, ""), asyncio.Queue[Tokens | Failed]()
        with closing(call):
            call.begin(arrived.put_nowait, asyncio.get_running_loop().call_soon_threadsafe)
            while call.open:
                call.push(await arrived.get())
                while not arrived.empty():  # the caller fell behind
                    call.push(arrived.get_nowait())
                yield call.output(0)


def _render(
    tokenizer: Tokenizer,
    messages: object,
    calls: Calls,
    variables: Mapping[str, Any] | None,
    ends: tuple[bool | None, bool],
) -> str:
    """Return a conversation as text."""
    if not (conversation := plain(messages)):
        raise ValueError("messages must not be empty")
    return tokenizer.template.render(conversation, calls.tools, variables, turn(conversation, *ends))


def _chat_request(
    formats: Formats, calls: Calls, text: str, ids: list[int], params: SamplingParams
) -> PromptJobs:
    """Return the request of a conversation."""
    grammar = params.grammar
    form = None if grammar is None else Form("grammar", lambda: grammar)
    calls.check(formats.calls, form and form.param)
    params, parsers = formats.plan(ids, params, params.n, calls, form)
    return PromptJobs(text, [Job(ids, params, choice, parser=each) for choice, each in enumerate(parsers)])


def _ignored_settings(settings: Settings) -> list[str]:
    """Return the server-only settings that were set and have no effect here."""
    names = [name for name, each in SETTINGS.items() if each.group == SERVER or name in _UNREAD]
    return [name for name in names if name not in _READ and getattr(settings, name) != SETTINGS[name].default]


def _listed(given: object) -> object:
    """Return an array, or what can only be iterated over, as a list."""
    return list(given) if isinstance(given, Iterator | KeysView | ValuesView) else _value(given)


def _value(given: object) -> Any:
    """Return an array, or one of its numbers, as Python's."""
    return given.tolist() if hasattr(given, "tolist") else given


def _of_dict(prompt: Mapping[str, Any], where: str) -> object:
    """Return the prompt that a dict holds."""
    if len(prompt) != 1 or not prompt.keys() <= set(_PROMPT_KEYS):
        raise ValueError(f"{where} must have the key {' or '.join(_PROMPT_KEYS)} alone, found {list(prompt)}")
    return _listed(*prompt.values())


def _is_sequence(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def _kind(given: object) -> str:
    return type(given).__name__


def _encodable(text: str, where: str) -> str:
    if not encodable(text):
        raise ValueError(f"{where} must be text that UTF-8 can encode")
    return text


def _params_each(params: object, count: int) -> list[tuple[SamplingParams, str]]:
    """Return copies of the parameters of each prompt, checked again, with their name in errors."""
    if isinstance(params, SamplingParams):
        return [(_checked(params), "sampling_params")] * count
    if not _is_sequence(params):
        raise ValueError(f"sampling_params must be SamplingParams or a list of them, found {_kind(params)}")
    if len(params) != count:
        raise ValueError(f"sampling_params must be one or as many as prompts: {count}, found {len(params)}")
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"sampling_params[{index}] must be SamplingParams, found {_kind(each)}")
    return [(_checked(each), f"sampling_params[{index}]") for index, each in enumerate(params)]


def _checked(params: SamplingParams) -> SamplingParams:
    params = msgspec.structs.replace(params)
    params.check()
    return params


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[], object]]:
    """Yield a function that counts one answer on a progress bar, if it is shown."""
    if not show:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="answer") as bar:
        yield bar.update
