"""Every field of OpenAI's API, by OpenAI's client, against a small model with speculation: see ``conformance.py``."""

from __future__ import annotations

import asyncio
import json
import re
import typing
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from specserve.server import schema
from specserve.server.chat import ChatRequest
from specserve.server.completions import CompletionRequest
from tests.engines import Checkpoints
from tests.front.conformance import BASE, BOTH, CASES, CHAT, COMPLETIONS, REFUSALS, Case, same
from tests.front.live import Live, live

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
FLAGS = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "1"]
FLAGS += ["--speculative-num-draft-tokens", "3", "--device", "cpu", "--dtype", "float32"]
FLAGS += ["--max-running-requests", "16"]  # all cases are asked at once
OWN = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
EXTENSIONS = {"top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids", "prediction",
              "speculation", "return_speculation", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
              "guided_grammar", "json_schema", "regex", "ebnf",
              "priority", "length_penalty", "use_beam_search",
              "add_generation_prompt", "continue_final_message", "skip_special_tokens", "include_stop_str_in_output",
              "return_token_ids", "chat_template_kwargs", "reasoning_field", "bad_words", "cache_salt", "request_id",
              "rid", "prompt_logprobs", "add_special_tokens", "separate_reasoning", "stream_reasoning",
              "thinking_token_budget"}  # fmt: skip
HONOURED = [(route, case) for case in CASES if case.check for route in case.routes]
REFUSED = [(route, case) for case in CASES if case.refused for route in case.routes]


@pytest.fixture(scope="module")
def server(small_chat: Checkpoints) -> Iterator[Live]:
    with live([*FLAGS, *small_chat.flags()], {}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


NAMED_OTHERWISE = {  # by field and words: what the error's param is instead
    ("messages[].role", "no call in the preceding assistant message has this id"): "messages[].tool_call_id",
    ("messages[].content", "'text'"): "messages[].content[].type",
    ("stream_options.include_usage", "only with stream"): "stream_options",
    ("stream_options.continuous_usage_stats", "only with stream"): "stream_options",
    ("metadata", "valid string"): "metadata.a",
    ("chat_template_kwargs", "does not read it"): "chat_template_kwargs.enable_thinking",
    ("chat_template_kwargs", "is set by the server"): "chat_template_kwargs.messages",
    ("response_format", "'text'"): "response_format.type",
    ("response_format", "json_schema: this field is required"): "response_format.json_schema",
    ("prediction", "'content'"): "prediction.type",
    ("speculation", "greater than or equal to 0"): "speculation.max_draft_tokens",
}


@pytest.fixture(scope="module")
def caller(server: Live, client: openai.OpenAI) -> Caller:
    return Caller(server, client)


def arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """As the client takes them: what OpenAI does not have goes next to."""
    extra = {name: value for name, value in fields.items() if name in EXTENSIONS}
    return {**{name: value for name, value in fields.items() if name not in extra}, "extra_body": extra}


def create(client: Any, route: str) -> Any:
    return client.chat.completions if route == CHAT else client.completions


def text_of(route: str, choice: Any) -> str:
    return str(choice.message.content if route == CHAT else choice.text)


class Caller:
    """Send requests, each only once, and check answers against their description. What honoured cases ask for is asked
    at once, so that requests share batches: whole, and streamed where that may make a difference."""

    def __init__(self, server: Live, client: openai.OpenAI) -> None:
        self.client = client
        self._answers: dict[str, Any] = {}
        self.streams: dict[str, tuple[list[str], tuple[int, int, int]]] = {}
        asyncio.run(self._ask_at_once(server))

    def answer(self, route: str, fields: dict[str, Any]) -> Any:
        if key(route, fields) not in self._answers:
            given = arguments({**BASE[route], **fields})
            self._keep(route, fields, create(self.client, route).with_raw_response.create(**given))
        return self._answers[key(route, fields)]

    def _keep(self, route: str, fields: Mapping[str, Any], raw: Any) -> None:
        described = schema.ChatCompletion if route == CHAT else schema.Completion
        msgspec.json.decode(raw.http_response.content, type=described)
        self._answers[key(route, fields)] = raw.parse()

    async def _ask_at_once(self, server: Live) -> None:
        async def whole(route: str, fields: Mapping[str, Any]) -> None:
            given = arguments({**BASE[route], **fields})
            self._keep(route, fields, await create(client, route).with_raw_response.create(**given))

        async def stream(route: str, case: Case) -> None:
            self.streams[case.id(route)] = await streamed(client, route, case.given)

        async with openai.AsyncOpenAI(base_url=self.client.base_url, api_key="x", max_retries=0) as client:
            given = {key(route, case.given): (route, case.given) for route, case in HONOURED}
            work = [whole(*each) for each in given.values()]
            work += [stream(route, case) for route, case in HONOURED if case.streams]
            server.awake.clear()
            answers = asyncio.gather(*work)
            while server.built.engine.stats().waiting < len(work) and not answers.done():
                await asyncio.sleep(0.02)
            server.awake.set()
            await answers


def key(route: str, fields: Mapping[str, Any]) -> str:
    return route + json.dumps(dict(fields))


class Asked:
    """See ``conformance.Seen``."""

    def __init__(self, caller: Caller, route: str, fields: dict[str, Any]) -> None:
        self.route = route
        self.answer = caller.answer(route, fields)
        self._caller = caller

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        return [text_of(self.route, choice) for choice in self.answer.choices]

    def ask(self, **fields: Any) -> Asked:
        return Asked(self._caller, self.route, fields)


class Texts:
    """The texts of a stream's choices."""

    def __init__(self, route: str) -> None:
        self._route = route
        self._found: dict[int, str] = {}

    def add(self, choices: Any) -> None:
        for choice in choices:
            new = choice.delta.content if self._route == CHAT else choice.text
            self._found[choice.index] = self._found.get(choice.index, "") + (new or "")

    @property
    def all(self) -> list[str]:
        return [self._found[index] for index in sorted(self._found)]


async def streamed(
    client: openai.AsyncOpenAI, route: str, fields: Mapping[str, Any]
) -> tuple[list[str], tuple[int, int, int]]:
    """The texts of a stream, and what is counted."""
    texts, usages = Texts(route), []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await create(client, route).create(**arguments({**BASE[route], **fields, **options})):
        texts.add(chunk.choices)
        usages += [] if chunk.usage is None else [tokens(chunk)]
    (usage,) = usages
    return texts.all, usage


def tokens(found: Any) -> tuple[int, int, int]:
    """What is counted of an answer, whatever the cache held."""
    return found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens


def ids(cases: list[tuple[str, Case]]) -> list[str]:
    return [case.id(route) for route, case in cases]


@pytest.mark.parametrize(("route", "case"), HONOURED, ids=ids(HONOURED))
def test_honoured(caller: Caller, route: str, case: Case) -> None:
    seen = Asked(caller, route, dict(case.given))
    assert case.check is not None
    case.check(seen)
    assert not case.streams or caller.streams[case.id(route)] == (seen.texts, tokens(seen.answer))


@pytest.mark.parametrize("route", BOTH)
def test_streams_are_as_described(caller: Caller, route: str) -> None:
    """By the plain client; the last event before the end has the usage of all."""
    fields = {"n": 2, "logprobs": True if route == CHAT else 2, "return_speculation": True}
    if route == COMPLETIONS:
        fields["echo"] = True
    options = {"stream": True, "stream_options": {"include_usage": True}}
    described = schema.ChatCompletionChunk if route == CHAT else schema.Completion
    texts, usage = Texts(route), None
    given = arguments({**BASE[route], **fields, **options})
    with create(caller.client, route).create(**given) as stream:
        for event in stream._iter_events():
            if event.data == "[DONE]":
                break
            assert usage is None
            found = msgspec.json.decode(event.data, type=described)
            assert (found.usage is None) == bool(found.choices)
            usage = found.usage
            texts.add(found.choices)
    seen = Asked(caller, route, fields)
    assert texts.all == seen.texts
    assert usage is not None
    assert usage.completion_tokens == seen.answer.usage.completion_tokens


@pytest.mark.parametrize("route", BOTH)
def test_what_changes_nothing_changes_no_stream(caller: Caller, route: str) -> None:
    """All of it at once."""
    fields: dict[str, Any] = {}
    for each, case in HONOURED:
        if case.check is same and each == route:
            fields |= case.given
    texts = Texts(route)
    for chunk in create(caller.client, route).create(**arguments({**BASE[route], **fields, "stream": True})):
        texts.add(chunk.choices)
    assert texts.all == Asked(caller, route, {}).texts


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("route", BOTH)
def test_usage_of_each_chunk(caller: Caller, route: str, last: bool) -> None:
    """As guidellm asks for it: of the chunk's choice, so far. The last chunk has that of all."""
    fields: dict[str, Any] = {"n": 2, "seed": 3}
    if route == COMPLETIONS:
        fields |= {"prompt": ["a", "def add(a, b):"]}
    options = {"stream": True, "stream_options": {"include_usage": last, "continuous_usage_stats": True}}
    given, found = arguments({**BASE[route], **fields, **options}), []
    for chunk in create(caller.client, route).create(**given):
        found.append(([choice.index for choice in chunk.choices], tokens(chunk)))
    whole = Asked(caller, route, fields).answer
    if last:
        assert found.pop() == ([], tokens(whole))
    ends: dict[int, tuple[int, int, int]] = {}
    for (index,), usage in found:
        assert usage[1] >= ends.get(index, (0, 0, 0))[1]
        ends[index] = usage
    assert sum(made for _, made, _ in ends.values()) == whole.usage.completion_tokens
    assert sum(prompt for prompt, _, _ in ends.values()) == 2 * whole.usage.prompt_tokens


SAMPLED = {"temperature": 1.0, "max_tokens": 16, "seed": 3}
LOSSLESS: list[dict[str, Any]] = [
    {"n": 3},
    {"n": 2, "best_of": 3},
    {"logprobs": 5, "frequency_penalty": 1},
    {"echo": True, "logprobs": 2, "top_p": 0.9},
    {"min_tokens": 12, "stop": ["a", "e", " "], "logprobs": 0},
    {"ignore_eos": True, "logprobs": 1, "logit_bias": {"300": 3}},
]


@pytest.mark.parametrize("fields", LOSSLESS, ids=str)
def test_speculation_changes_nothing(caller: Caller, fields: dict[str, Any]) -> None:
    """Neither texts, nor where they end, nor what is counted, nor log-probabilities."""
    check_lossless(caller, fields)


def test_speculation_changes_no_stop_across_tokens(caller: Caller) -> None:
    """Stop strings of the end of a token and the start of the next, wherever in a step's run they come."""
    free = Asked(caller, COMPLETIONS, {**SAMPLED, "logprobs": 0})
    pairs = [first[-1:] + second[:1] for first, second in pairwise(free.answer.choices[0].logprobs.tokens)]
    stops = [stop for stop in dict.fromkeys(pairs) if len(stop) == 2 and free.text.find(stop) > 4]
    assert len(stops) > 2
    for stop in stops[:3]:
        stopped = check_lossless(caller, {"stop": stop, "logprobs": 0})
        assert stopped.texts == [free.text[: free.text.index(stop)]]
        assert stopped.answer.choices[0].finish_reason == "stop"


def check_lossless(caller: Caller, fields: dict[str, Any]) -> Asked:
    on, off = (
        Asked(
            caller,
            COMPLETIONS,
            {**SAMPLED, **fields, "return_speculation": True, "speculation": {"enabled": enabled}},
        )
        for enabled in (True, False)
    )
    drafted = [seen.answer.usage.speculation["drafted"] for seen in (on, off)]
    assert drafted[0] > drafted[1] == 0
    assert on.texts == off.texts
    assert on.answer.usage.completion_tokens == off.answer.usage.completion_tokens
    for ours, theirs in zip(on.answer.choices, off.answer.choices, strict=True):
        assert ours.finish_reason == theirs.finish_reason
        if ours.logprobs is not None:
            assert ours.logprobs.tokens == theirs.logprobs.tokens
            assert ours.logprobs.text_offset == theirs.logprobs.text_offset
            assert values(ours) == pytest.approx(values(theirs), abs=1e-4)
    return on


def values(choice: Any) -> list[float]:
    """All log-probabilities: the tokens', then the alternatives'."""
    tops = [value for top in choice.logprobs.top_logprobs if top for value in sorted(top.values())]
    return [value for value in choice.logprobs.token_logprobs if value is not None] + tops


@pytest.mark.parametrize(("route", "case"), REFUSED, ids=ids(REFUSED))
def test_refused(client: openai.OpenAI, route: str, case: Case) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        create(client, route).create(**arguments({**BASE[route], **case.given}))
    assert caught.value.status_code == (404 if case.field == "model" else 400)
    msgspec.json.decode(caught.value.response.content, type=schema.Error)
    assert case.refused in caught.value.message
    assert (caught.value.code == "unsupported_parameter") == ("not supported: " in caught.value.message)
    named = re.sub(r"\.\d+\.", "[].", caught.value.param or "")
    assert named == NAMED_OTHERWISE.get((case.field, case.refused), case.field)


def test_no_field_is_missing() -> None:
    """Of the client's request types, of the messages' and of ours."""
    known = {case.field for case in CASES}
    for params, route in ((chat_create_params, CHAT), (completion_create_params, COMPLETIONS)):
        fields = {"stream", *params.CompletionCreateParamsBase.__annotations__} - {"stream_options"}
        covered = {case.field for case in CASES if route in case.routes}
        assert fields <= covered, route
    assert OWN - {"stream_options"} <= known
    options = typing.get_type_hints(chat_types.ChatCompletionStreamOptionsParam)
    assert {f"stream_options.{name}" for name in options} <= known
    roles = ("Developer", "System", "User", "Assistant", "Tool", "Function")
    for role in roles:
        fields = set(typing.get_type_hints(getattr(chat_types, f"ChatCompletion{role}MessageParam")))
        assert {f"messages[].{name}" for name in fields} <= known
    parts = {"text", "refusal"}
    for part in typing.get_args(chat_types.ChatCompletionContentPartParam):
        parts |= set(typing.get_args(typing.get_type_hints(part)["type"]))
    tested = {
        part["type"]
        for case in CASES
        for message in case.given.get("messages", ())
        if isinstance(message.get("content"), list)
        for part in message["content"]
    }
    assert tested == parts


def test_the_page_names_every_field() -> None:
    """Those that are always refused in a paragraph that says so, and no other field there."""
    page = PAGE.read_text()
    refusals = " ".join(part for part in page.split("\n\n") if part.startswith("Refused unless "))
    said, named = (set(re.findall(r"`([a-z_.]+)", text)) for text in (refusals, page))
    fields = {case.field.removeprefix("messages[]."): case.field in REFUSALS for case in CASES}
    assert {name.split(".")[-1] for name in fields} <= {part for name in named for part in name.split(".")}
    assert {name for name, refused in fields.items() if refused} == said & {*fields}


def test_other_routes(client: openai.OpenAI, server: Live) -> None:
    """The client's other calls, and its way to routes that OpenAI does not have."""
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "specserve-chat"
    assert model.to_dict()["max_model_len"] == server.built.settings.context_length
    msgspec.json.decode(client.models.with_raw_response.list().http_response.content, type=schema.Models)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    base = client.with_options(base_url=server.url)
    described: list[tuple[str, Any, dict[str, Any]]] = [
        ("/tokenize", schema.Tokenized, {"prompt": "a b"}),
        ("/tokenize", schema.Tokenized, {"messages": BASE[CHAT]["messages"]}),
        ("/detokenize", schema.Detokenized, {"tokens": [5, 6]}),
        ("/abort_request", schema.Aborted, {"rid": "none"}),
        ("/flush_cache", schema.Flushed, {}),
    ]
    for path, answer, body in described:
        msgspec.convert(base.post(path, cast_to=object, body=body), answer)
    for path, kind in (("/health", schema.Health), ("/server_info", schema.ServerInfo)):
        msgspec.convert(base.get(path, cast_to=object), kind)
