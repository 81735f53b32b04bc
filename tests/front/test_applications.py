"""Unmodified third-party programs against the bundled model: docs/clients.md. Each runs where it is installed;
test_programs.py tests their requests without them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from benchmarks.constrained import MARKS, marked_model
from specserve.config.paths import BUNDLED_DRAFTS
from tests.front.live import Live, live
from tests.front.test_process import wait

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("_offline")]

MODEL = "specserve-chat"
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
OPENED = {str(MARKS["<tool_call>"]): 30}  # as if the model had learned to begin calls


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if find_spec(name.partition(".")[0]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=0, le=9)]


TOOL = {
    "type": "function",
    "function": {"name": "Weather", "parameters": Weather.model_json_schema(), "strict": True},
}


def look(city: Literal["Paris", "Rome"]) -> str:
    """Look out."""
    return f"It rains in {city}."


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
        ("OPENAI_API_KEY", "x"),
    ):
        monkeypatch.setenv(name, value)
    yield
    gc.collect()  # connections that programs leave open, while warnings are ignored


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marked_model(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Live]:
    flags = [
        "--model-path",
        str(model),
        "--served-model-name",
        MODEL,
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    draft = ["--speculative-draft-model-path", str(BUNDLED_DRAFTS["EAGLE3"])]
    with live([*flags, "--speculative-algorithm", "EAGLE3", *draft], {}) as found:
        yield found


@pytest.fixture
def url(server: Live) -> str:
    return server.url + "/v1"


@needs("langchain_openai")
def test_langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(base_url=url, api_key="x", model=MODEL, max_retries=0, logit_bias=OPENED, **SHORT)
    for method in ("json_schema", "function_calling"):
        structured = llm.with_structured_output(Weather, method=method)
        assert structured.invoke("Rome?") == list(structured.stream("Rome?"))[-1]
    looking = tool(look)
    bound = llm.bind_tools([looking], strict=True, parallel_tool_calls=False)
    said = bound.invoke("Rome?")
    streamed = None
    for chunk in bound.stream("Rome?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert said.tool_calls[0]["args"] == streamed.tool_calls[0]["args"]
    results = [looking.invoke(call) for call in said.tool_calls]
    assert results[0].content.startswith("It rains")
    assert llm.invoke([HumanMessage("Rome?"), said, *results]).content


@needs("langchain", "langchain_openai")
def test_langchain_agent(url: str) -> None:
    """Its tools and a form of its answer are in one request."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(
        base_url=url, api_key="x", model=MODEL, max_retries=0, seed=1, **{**SHORT, "temperature": 1}
    )
    for strategy in (ProviderStrategy, ToolStrategy):
        agent = create_agent(llm, [tool(look)], response_format=strategy(Weather))
        found = agent.invoke({"messages": [("user", "Rome?")]}, {"recursion_limit": 40})
        assert isinstance(found["structured_response"], Weather)


@needs("pydantic_ai")
@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(url: str, api: str) -> None:
    """The agent's loop, until it calls the tool of its output or writes JSON."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(openai, api)(MODEL, provider=OpenAIProvider(base_url=url, api_key="x"))
    for output in (Weather, NativeOutput(Weather)):
        agent = Agent(model, output_type=output, tools=[look], model_settings={"max_tokens": 100}, retries=3)

        async def streamed(agent: Any = agent) -> Any:
            async with agent.run_stream("Rome?") as found:
                return await found.get_output()

        assert isinstance(agent.run_sync("Rome?").output, Weather)
        assert isinstance(asyncio.run(streamed()), Weather)


@needs("instructor")
def test_instructor(url: str) -> None:
    import instructor
    import openai

    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as api:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
            chat = instructor.from_openai(api, mode=mode).chat.completions
            given: dict[str, Any] = {"model": MODEL, "messages": ASKED, "response_model": Weather, **SHORT}
            assert isinstance(chat.create(**given, max_retries=0), Weather)
        *_, last = instructor.from_openai(api).chat.completions.create_partial(**given)
        assert Weather.model_validate(last.model_dump())


@needs("agents")
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, api: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    async def run() -> Any:
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            agent = agents.Agent(
                name="a",
                tools=[agents.function_tool(look)],
                output_type=Weather,
                model=getattr(agents, api)(model=MODEL, openai_client=client),
                model_settings=agents.ModelSettings(temperature=0, max_tokens=100, tool_choice="required"),
            )
            whole = await agents.Runner.run(agent, "Rome?", max_turns=9)
            streamed = agents.Runner.run_streamed(agent, "Rome?", max_turns=9)
            events = [event async for event in streamed.stream_events()]
            assert "tool_output" in {getattr(event, "name", "") for event in events}
            assert streamed.final_output == whole.final_output
            return whole.final_output

    assert isinstance(asyncio.run(run()), Weather)


@needs("litellm")
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(url: str, provider: str) -> None:
    import litellm

    base = url.removesuffix("/v1") if provider == "anthropic" else url
    given: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": "x",
        "messages": ASKED,
        **SHORT,
    }
    whole = litellm.completion(**given)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**given, stream=True)))
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    called = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "Weather"}}}
    (call,) = litellm.completion(**given, **called).choices[0].message.tool_calls
    chunks = list(litellm.completion(**given, **called, stream=True))
    (again,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(again.function.arguments)
    Weather.model_validate_json(call.function.arguments)
    formed = litellm.completion(**given, response_format=Weather).choices[0].message.content
    Weather.model_validate_json(formed)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**given, "messages": [{"role": "user", "content": "long " * 9000}]})


@needs("litellm", "apscheduler")
def test_litellm_proxy(url: str, tmp_path: Path) -> None:
    """Between the openai client and this server."""
    import openai

    route = {"model": f"hosted_vllm/{MODEL}", "api_base": url, "api_key": "x"}
    config = tmp_path / "proxy.yaml"  # YAML takes JSON
    key = "sk-" + "0123456789abcdef" * 4
    models = [{"model_name": "local", "litellm_params": route}]
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    proxy = subprocess.Popen([Path(sys.executable).with_name("litellm"), *command], cwd=tmp_path)
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as api:

            def is_ready() -> bool:
                try:
                    return bool(api.models.list().data)
                except openai.APIConnectionError:
                    return False

            wait(is_ready, 120)
            given: Any = {"model": "local", "messages": ASKED, **SHORT}
            assert api.chat.completions.parse(**given, response_format=Weather).choices[0].message.parsed
            with api.chat.completions.stream(**given, tools=[TOOL], tool_choice="required") as stream:
                for _ in stream:
                    pass
                called = stream.get_final_completion().choices[0].message.tool_calls
            assert called
            Weather.model_validate_json(called[0].function.arguments)
            assert api.responses.create(model="local", input="Rome?", max_output_tokens=9).output_text
    finally:
        proxy.terminate()
        proxy.wait()


@needs("autogen_agentchat", "autogen_ext")
def test_autogen(url: str) -> None:
    """An agent calls a function and answers by what it gave; JSON; two agents in turn."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    can = dict.fromkeys(("function_calling", "json_output", "structured_output"), True)
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=url, api_key="x", max_retries=0, **SHORT,
        model_info={**can, "vision": False, "family": "unknown"},
    )  # fmt: skip
    tool = FunctionTool(look, "Looks out.", strict=True)

    async def run() -> None:
        asked = [UserMessage(content="Rome?", source="user")]
        (call,) = (await client.create(asked, tools=[tool], tool_choice=tool)).content
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        Weather.model_validate_json((await client.create(asked, json_output=Weather)).content)
        agents = [AssistantAgent(name, client) for name in "ab"]
        team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3))
        assert [message.source for message in (await team.run(task="Rome?")).messages] == ["user", "a", "b"]
        agent = AssistantAgent("c", client, tools=[tool], output_content_type=Weather)
        assert isinstance((await agent.run(task="Rome?")).messages[-1].content, Weather)
        await client.close()

    asyncio.run(run())


@needs("haystack")
@pytest.mark.parametrize("api", ["OpenAIChatGenerator", "OpenAIResponsesChatGenerator"])
def test_haystack(url: str, api: str) -> None:
    """Streamed, and an agent that calls a function."""
    from haystack.components.agents import Agent
    from haystack.components.generators import chat
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    limit = "max_tokens" if api == "OpenAIChatGenerator" else "max_output_tokens"
    model = getattr(chat, api)(
        model=MODEL, api_base_url=url, api_key=Secret.from_token("x"), streaming_callback=lambda _: None,
        generation_kwargs={limit: 200, "tool_choice": "required"},
    )  # fmt: skip
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(look)], exit_conditions=["look"])
    asked, called, result = agent.run(messages=[ChatMessage.from_user("Rome?")])["messages"]
    assert asked.text == "Rome?"
    assert called.tool_calls
    assert result.tool_call_results[0].result.startswith("It rains")


@needs("llama_index")
def test_llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL, api_base=url, api_key="x", max_retries=0, context_window=4096, temperature=0, max_tokens=200,
        is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip
    asked = ChatMessage(role="user", content="Rome?")
    assert "".join(part.delta for part in llm.stream_chat([asked])) == llm.chat([asked]).message.content
    assert isinstance(llm.as_structured_llm(Weather).complete("Rome?").raw, Weather)
    tool = FunctionTool.from_defaults(lambda city: look(city), name="look", fn_schema=Weather)
    (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], "Rome?", tool_required=True))
    assert look(call.tool_kwargs["city"]).startswith("It rains")


@needs("llm")
def test_llm(url: str, tmp_path: Path) -> None:
    model = {"model_id": "ours", "model_name": MODEL, "api_base": url, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # YAML takes JSON

    def ask(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words, "-o", "temperature", "0", "-o", "max_tokens", "200"]
        environ = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout

    assert ask("-m", "ours", "Rome?") == ask("-m", "ours", "--no-stream", "Rome?")
    assert ask("-c", "And Paris?")
    closed = {**Weather.model_json_schema(), "additionalProperties": False}
    Weather.model_validate_json(ask("-m", "ours", "--schema", json.dumps(closed), "Rome?"))


@needs("smolagents")
def test_smolagents(url: str) -> None:
    """Until it has called a function, whose result it sends back."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def look(city: str) -> str:
        """Look out.

        Args:
            city: Where.
        """
        return f"It rains in {city}."

    model = OpenAIServerModel(model_id=MODEL, api_base=url, api_key="x", temperature=0, max_tokens=200)
    for streams in (False, True):
        agent = ToolCallingAgent(tools=[look], model=model, max_steps=2, stream_outputs=streams)
        assert agent.run("Rome?") is not None
        assert all(
            step.tool_calls for step in agent.memory.steps if hasattr(step, "tool_calls") and not step.error
        )


@needs("guidellm")
def test_guidellm(server: Live, model: Path, tmp_path: Path) -> None:
    options = {
        "--backend": f"kind=openai_http,target={server.url}",
        "--profile": "kind=synchronous",
        "--constraint": "kind=max_requests,count=3",
        "--tokenizer": f"kind=huggingface_auto,model={model}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
    }
    command = [sys.executable, "-m", "guidellm", "run", *(word for pair in options.items() for word in pair)]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"]["successful"] == 3


TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{c}}", "doc_to_target": 0},
    "score": {"output_type": "loglikelihood", "doc_to_target": "{{c[0]}}"},
    "write": {
        "output_type": "generate_until",
        "doc_to_target": "{{c[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
    },
}
DOCUMENTS = [
    {"q": "The capital of France is", "c": [" Paris", " Rome"]},
    {"q": "def add(a, b):\n    return", "c": [" a + b", " None"]},
]


@needs("lm_eval")
def test_lm_eval(url: str, model: Path, tmp_path: Path) -> None:
    """Scores and texts are those of its own backend for Hugging Face's models."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    documents = tmp_path / "documents.jsonl"
    documents.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for name, task in TASKS.items():
        given = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}}"}
        data = {"dataset_kwargs": {"data_files": {"test": str(documents)}}, "target_delimiter": ""}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**given, **data, **task}))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def answers(backend: str, **options: Any) -> dict[str, list[Any]]:
        found = lm_eval.simple_evaluate(
            model=backend, model_args=options, tasks=[*TASKS], task_manager=tasks, bootstrap_iters=0
        )["samples"]
        return {name: [each["resps"] for each in sorted(found[name], key=_number)] for name in TASKS}

    own = answers("hf", pretrained=str(model), dtype="float32", device="cpu")
    ours = answers(
        "local-completions",
        model=MODEL,
        base_url=f"{url}/completions",
        tokenizer=str(model),
        add_bos_token=True,
    )
    assert ours["write"] == own["write"]
    for name in ("choice", "score"):
        for found, expected in zip(_flat(ours[name]), _flat(own[name]), strict=True):
            assert found == pytest.approx(expected, abs=1e-3)


def _number(sample: dict[str, Any]) -> int:
    return int(sample["doc_id"])


def _flat(found: Any) -> list[float]:
    """Scores and whether they are the greedy text's."""
    return [float(found)] if isinstance(found, (float, bool)) else [x for each in found for x in _flat(each)]
