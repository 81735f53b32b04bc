"""``LLM`` and ``AsyncLLM`` over a fake engine: order, forms of prompts, threads and tasks, errors, and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

import specserve
import specserve.models.read_config
import specserve.process.assemble
from specserve import LLM, AsyncLLM, FunctionCall, RequestOutput, SamplingParams, grammar
from specserve.core import Capacity, FieldError, Thought
from specserve.frontend.tokenizer import Tokenizer
from specserve.layers.linear import PLAIN
from specserve.messages import Failed, Submit, Tokens
from specserve.process import phase
from tests.front.fake_engine import CONTEXT, EOS, VOCAB, FakeEngine
from tests.front.fakes import byte_tokenizer

MODEL_CONFIG = SimpleNamespace(
    architecture="LlamaForCausalLM",
    longest_context=(CONTEXT, "max_position_embeddings"),
    dtype="float32",
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    weights=PLAIN,
    most_levels=None,
    layers=(),
    states=(),
    notes=(),
)


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return make(tmp_path, monkeypatch)


def make(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    """An LLM whose engine repeats the prompt; long prompts end later than short ones that came after them."""
    prepare(path, monkeypatch)
    return LLM(str(path), device="cpu", **settings)


def make_async(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncLLM:
    prepare(path, monkeypatch)
    return AsyncLLM(model=str(path), device="cpu")


def prepare(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_tokenizer().save_pretrained(path)
    monkeypatch.setattr(specserve.models.read_config, "load_model_config", lambda *_: MODEL_CONFIG)
    monkeypatch.setattr(specserve.process.assemble, "create_scheduler", lambda *_, **__: FakeEngine(_echo))


def _echo(message: Submit) -> list[int]:
    return [*message.token_ids, 256]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def engine_of(llm: LLM | AsyncLLM) -> FakeEngine:
    engine = llm.engine
    assert isinstance(engine, FakeEngine)
    return engine


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


def test_the_package_is_found_next_to_a_folder_of_its_name(tmp_path: Path) -> None:
    """As from the folder that holds a checkout. Its names are listed before they are loaded."""
    (tmp_path / "specserve").mkdir()
    code = "import specserve, sys; print(dir(specserve) == sorted(specserve.__all__), 'torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, check=True
    )
    assert said.stdout.split() == [b"True", b"False"]
    for name in specserve.__all__:
        assert getattr(specserve, name) is not None


def test_prompts_of_all_forms_in_order(llm: LLM) -> None:
    assert texts(llm.generate("one")) == ["one"]
    assert texts(llm.generate(["a longer prompt", "b", [99, 100]])) == ["a longer prompt", "b", "cd"]
    (found,) = llm.generate([65, 66], SamplingParams(logprobs=1))
    assert (found.text, found.token_ids, found.prompt_token_ids) == ("AB", [65, 66, 256], [65, 66])
    assert (found.finish_reason, found.cached_tokens, found.speculation.steps) == ("stop", 4, 1)
    assert [item.token_id for item in found.logprobs or []] == [65, 66, 256]
    assert llm.generate([]) == []


def test_prompts_as_others_give_them(llm: LLM) -> None:
    assert texts(llm.generate([{"prompt": "one"}, {"prompt_token_ids": [65]}])) == ["one", "A"]
    assert texts(llm.generate({"prompt": "one"})) == ["one"]
    assert texts(llm.generate(text for text in ("a", "b"))) == ["a", "b"]
    assert texts(llm.generate(np.array([65, 66]))) == ["AB"]  # type: ignore[arg-type]
    assert texts(llm.generate(torch.tensor([[65, 66], [67, 68]]))) == ["AB", "CD"]  # type: ignore[arg-type]
    assert texts(llm.generate([np.array([65, 66]), torch.tensor([67])])) == ["AB", "C"]  # type: ignore[list-item]
    assert texts(llm.generate({1: "a", 2: "b"}.values())) == ["a", "b"]
    (found,) = llm.generate([[np.int64(65), np.int32(66)]])  # type: ignore[list-item]
    assert (found.prompt_token_ids, list(map(type, found.prompt_token_ids))) == ([65, 66], [int, int])


def test_outputs_as_others_read_them(llm: LLM) -> None:
    (found,) = llm.generate("abc", SamplingParams(n=3, stop="c", logprobs=0))
    assert (found.prompt, found.finished) == ("abc", True)
    assert [(each.index, each.text, each.finish_reason) for each in found.outputs] == [
        (index, "ab", "stop") for index in range(3)
    ]
    first = found.outputs[0]
    assert first.stop_reason == "c"
    names = ("text", "token_ids", "finish_reason", "logprobs", "speculation", "content", "tool_calls")
    assert [getattr(found, name) for name in names] == [getattr(first, name) for name in names]
    assert sorted(each.choice for each in engine_of(llm).submitted) == [0, 1, 2]
    assert [each.prompt for each in llm.generate([[65], "b"])] == [None, "b"]
    assert [each.prompt for each in llm.chat([{"role": "user", "content": "hi"}])] == ["user:hi\nassistant:"]
    assert llm.get_tokenizer().decode([65]) == "A"


def test_parameters_as_others_give_them(llm: LLM) -> None:
    assert SamplingParams(stop="x").stop == ["x"]
    assert (SamplingParams(stop=None).stop, SamplingParams(stop_token_ids=None).stop_token_ids) == ([], [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"n must be in \[1, 128\], found 0"):
        SamplingParams(n=0)
    with pytest.raises(TypeError, match="SamplingParams has no best_of: answers are not ranked"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    params = SamplingParams()
    params.max_tokens = 2
    assert texts(llm.generate(["abc", "def"], params)) == ["ab", "de"]
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p must be in"):
        llm.generate("a", params)
    with pytest.raises(TypeError, match="SamplingParams has no max_completion_tokens: use max_tokens"):
        SamplingParams(max_completion_tokens=2)  # type: ignore[call-arg]
    for name, words in {
        "max_model_len": "unknown setting; here it is context_length",
        "pipeline_parallel_size": "not accepted: every layer is shared out, by --tensor-parallel-size; leave it out",
        "hf_overrides": "not accepted: edit config.json",
    }.items():
        with pytest.raises(ValueError, match=f"{name}: {words}"):
            LLM(model="x", **{name: 5})


def test_threads_get_their_own_answers(llm: LLM) -> None:
    prompts = [[f"thread {index}, prompt {each}" for each in range(5)] for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert [texts(each) for each in threads.map(llm.generate, prompts)] == prompts


async def answer_of(llm: AsyncLLM, prompt: str, seen: list[str]) -> str:
    async for output in llm.generate(prompt):
        seen.append(output.text)
    assert output.finished
    return output.text


def test_tasks_stream_their_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_async(tmp_path, monkeypatch)
    slow(engine_of(llm))

    async def ask() -> None:
        prompts = [f"task {index}: " + "x" * 3 * index for index in range(8)]
        seen: list[list[str]] = [[] for _ in prompts]
        asked = (answer_of(llm, *each) for each in zip(prompts, seen, strict=True))
        assert await asyncio.gather(*asked) == prompts
        assert all(texts == sorted(texts, key=len) for texts in seen)
        assert max(map(len, seen)) > 2
        question = [{"role": "user", "content": "hi"}]
        *_, last = [each async for each in llm.chat(question, SamplingParams(n=2))]
        assert [each.text for each in last.outputs] == ["user:hi\nassistant:"] * 2
        for prompt, words in ((["a", "b"], "one prompt at a time; found 2"), ("", "must not be empty")):
            with pytest.raises(ValueError, match=words):
                await anext(llm.generate(prompt))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="seed 13 is unlucky"):
            await anext(llm.generate("a", SamplingParams(seed=13)))

    for _ in range(2):
        asyncio.run(ask())  # each time on a loop of its own
    llm.close()
    with pytest.raises(ValueError, match="this AsyncLLM is closed"):
        asyncio.run(ask())


def test_a_task_that_leaves_ends_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_async(tmp_path, monkeypatch)
    endless = slow(engine_of(llm))

    async def leave() -> None:
        async with contextlib.aclosing(llm.generate("a" * 200)) as answer:
            await anext(answer)
        assert engine_of(llm).aborted == [endless.submitted[0].rid]
        task = asyncio.create_task(answer_of(llm, "b" * 200, []))
        while len(endless.submitted) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert engine_of(llm).aborted == [each.rid for each in endless.submitted]


def slow(engine: FakeEngine) -> FakeEngine:
    """The engine, whose iterations take a while."""
    run = engine.run_once
    engine.run_once = lambda: (time.sleep(0.01), run())[1]  # type: ignore[method-assign]
    return engine


def test_ctrl_c_ends_the_call_and_not_the_engine(llm: LLM) -> None:
    engine = slow(engine_of(llm))

    def interrupt() -> None:
        while not engine.submitted:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a" * 200)
    signal.signal(signal.SIGINT, before)
    assert not engine_of(llm).has_work
    assert engine.aborted == [engine.submitted[0].rid]
    assert texts(llm.generate("still here")) == ["still here"]


def test_an_engine_that_fails(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Everybody is told, and told again."""
    engine = slow(engine_of(llm))
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(llm.generate, "a" * 200)
        while not engine.submitted:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match=r"the engine failed: .*died of seed 14"):
            llm.generate("a", SamplingParams(seed=14))
        with pytest.raises(RuntimeError, match=r"the engine failed: .*died of seed 14"):
            other.result()
    with pytest.raises(RuntimeError, match=r"the engine failed: .*died of seed 14"):
        llm.generate("a")
    assert "the engine failed" in caplog.text
    llm.close()


def test_a_model_closed_while_it_answers(llm: LLM) -> None:
    engine = slow(engine_of(llm))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(llm.generate, "a" * 200)
        while not engine.submitted:
            time.sleep(0.001)
        llm.close()
        with pytest.raises(RuntimeError, match="the engine was closed"):
            asked.result()
    assert engine.closed


def test_a_model_that_nobody_holds_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(tmp_path, monkeypatch)
    engine = engine_of(llm)
    assert texts(llm.generate("a")) == ["a"]
    del llm
    gc.collect()
    assert engine.closed


def test_a_build_that_nobody_waits_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer, which loads meanwhile, is missing."""
    prepare(tmp_path, monkeypatch)
    (tmp_path / "tokenizer.json").unlink()
    building, entered = threading.Event(), list[str]()

    def create(*_: object, **__: object) -> FakeEngine:
        phase.enter("begun")
        building.set()
        while True:
            time.sleep(0.01)
            phase.enter("more")
            entered.append("more")

    monkeypatch.setattr(specserve.process.assemble, "create_scheduler", create)
    load = Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda *given: (building.wait(), load(*given))[1])
    with pytest.raises(ValueError, match=r"can't be loaded: it has no tokenizer\.json"):
        LLM(str(tmp_path), device="cpu")
    count = len(entered)
    time.sleep(0.05)
    assert len(entered) == count


def test_a_loop_is_woken_once_for_all_its_answers(llm: LLM) -> None:
    """And a loop that has been closed takes none."""
    engine, woken = llm._engine, list[int]()  # private: asyncio's loops can't be watched
    assert engine is not None
    requests = [Submit(f"r{index}", [1] * 9, SamplingParams()) for index in range(3)]
    got = list[Tokens | Failed]()

    def post(call: Callable[..., object], batch: Sized) -> None:
        woken.append(len(batch))
        if len(woken) == 2:
            raise RuntimeError("Event loop is closed")
        call(batch)

    slow(engine_of(llm))
    engine.submit(requests, got.append, post)
    fake = engine_of(llm)  # waits
    assert woken == [3, 3]
    assert [message.rid for message in got] == ["r0", "r1", "r2"]
    assert fake.aborted == ["r0", "r1", "r2"]


def test_leaks_are_looked_for_once_there_is_rest(llm: LLM) -> None:
    """And once: it would hold up requests."""
    engine, calls, ran = engine_of(llm), list[float](), list[float]()
    run = engine.run_once
    engine.run_once = lambda: (run(), ran.append(time.monotonic()))[0]  # type: ignore[method-assign]
    engine.check_idle = lambda: calls.append(time.monotonic())  # type: ignore[method-assign]
    with patch("specserve.process.worker.REST", 0.2):
        llm.generate("a")
        while not calls:
            time.sleep(0.001)
        time.sleep(0.3)
    (checked,) = calls
    assert checked - ran[-1] >= 0.2


def test_a_caller_has_the_idle_engine_for_itself(llm: LLM) -> None:
    with patch("specserve.process.worker.REST", 0.05):
        llm.generate("a")
        engine = engine_of(llm)
        engine.submit(Submit("its own", [1], SamplingParams()))
        time.sleep(0.2)
        assert [each.rid for each in engine.run_once() if isinstance(each, Tokens)] == ["its own"]


def test_a_forked_process_has_no_engine(llm: LLM) -> None:
    assert texts(llm.generate("a")) == ["a"]
    if not (child := os.fork()):
        try:
            llm.generate("a")
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert texts(llm.generate("a")) == ["a"]


def test_ctrl_c_while_it_closes(llm: LLM) -> None:
    engine = engine_of(llm)
    with (
        patch.object(threading.Thread, "join", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        llm.close()
    llm.close()
    assert engine.closed


def test_a_special_token_as_a_stop_string(llm: LLM) -> None:
    (found,) = llm.generate([97, 257, 98], SamplingParams(stop=["<sep>"]))
    assert (found.text, found.finish_reason, found.token_ids) == ("a", "stop", [97, 257])


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(stop=["g"])]
    first, second = llm.generate(["abcd", "efgh and more"], params)
    assert (first.text, first.finish_reason) == ("ab", "length")
    assert (second.text, second.finish_reason, second.token_ids) == ("ef", "stop", list(b"efg"))
    assert second.logprobs is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0.6, 20)),
        ({"requests_all_greedy": True}, (0, 20)),
        ({"sampling_defaults": "openai"}, (1, -1)),
        ({"sampling_defaults": "openai", "requests_all_greedy": True}, (0, -1)),
    ],
)
def test_calls_without_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: tuple[float, int]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    llm = make(tmp_path, monkeypatch, **settings)
    llm.generate(["a", "b"])
    llm.chat([{"role": "user", "content": "hi"}])
    llm.generate("a", SamplingParams(temperature=0, top_k=3))
    found = [(sent.params.temperature, sent.params.top_k) for sent in engine_of(llm).submitted]
    assert found == [*[expected] * 3, (0, 3)]
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k) == expected


def test_empty_text_that_the_tokenizer_would_begin(llm: LLM) -> None:
    begun = byte_tokenizer()
    begun.backend_tokenizer.post_processor = TemplateProcessing(
        single="<sep> $A", special_tokens=[("<sep>", 257)]
    )
    llm.tokenizer = Tokenizer(begun)
    assert llm.generate("a")[0].prompt_token_ids == [257, 97]
    with pytest.raises(ValueError, match="the prompt must not be empty"):
        llm.generate("")
    with pytest.raises(ValueError, match=r"prompts\[1\] must not be empty"):
        llm.generate(["a", ""])


def test_chat(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    assert texts(llm.chat(one)) == ["user:hi\nassistant:"]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert texts(llm.chat([{"role": "user", "content": parts}])) == ["user:hi\nassistant:"]
    assert texts(llm.chat([one, one], SamplingParams(max_tokens=4), use_tqdm=True)) == ["user", "user"]
    begun = [*one, {"role": "assistant", "content": "So"}]
    assert texts(llm.chat(begun, continue_final_message=True)) == ["user:hi\nassistant:So"]
    assert texts(llm.chat(begun, add_generation_prompt=False)) == ["user:hi\nassistant:So\n"]
    with pytest.raises(ValueError, match="only if the last message is the assistant's"):
        llm.chat(one, continue_final_message=True)


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
ADD, NOW = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now"}'
CALLED = f"<think>hm</think>So: <tool_call>{ADD}</tool_call><tool_call>{NOW}</tool_call>"
ECHO = "{% if tools %}{% endif %}{{ messages[0].content }}"


def test_a_broken_call_can_be_sent_back(llm: LLM) -> None:
    """As ``tool_calls`` returns it, without ids."""
    function = {"name": "add", "arguments": '{"a": 1,}'}
    called = {
        "role": "assistant",
        "content": "So",
        "tool_calls": [{"type": "function", "function": function}],
    }
    said = [*echo("hi"), called, {"role": "tool", "content": "3"}, {"role": "system", "content": "x"}]
    assert texts(llm.chat(said)) == ["user:hi\nassistant:So\ntool:3\nsystem:x\nassistant:"]


def echo(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_tools_and_thoughts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer, which repeats the prompt, is taken apart."""
    read = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    llm = make(tmp_path, monkeypatch, chat_template=ECHO, **read)
    assert "has no effect" not in caplog.text
    first, second = llm.chat([echo(CALLED), echo("add now")], tools=TOOLS)
    assert (first.text, first.reasoning_content, first.content) == (CALLED, "hm", "So:")
    assert first.tool_calls == [FunctionCall("add", '{"a": 1}'), FunctionCall("now", "{}")]
    assert (second.content, second.reasoning_content, second.tool_calls) == ("add now", "", [])
    (free,) = llm.chat(echo(CALLED), tools=TOOLS, tool_choice="none")
    assert (free.content, free.tool_calls) == (CALLED.removeprefix("<think>hm</think>"), [])
    assert llm.generate(CALLED)[0].content == CALLED


def test_what_calls_and_thoughts_ask_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    llm = make(tmp_path, monkeypatch, chat_template=ECHO, tool_call_parser="hermes", reasoning_parser="qwen3")
    asked = [echo("add now <think>"), echo("add now")]
    llm.chat(asked, SamplingParams(thinking_token_budget=5), tools=TOOLS, tool_choice="required")
    first, second = engine_of(llm).submitted
    assert first.params.grammar != second.params.grammar
    assert all("%json" in str(each.params.grammar) for each in (first, second))
    end = [*b"\n</think>"]
    for each, begun in ((first, True), (second, False)):
        assert each.params.thinking_token_budget == 5
        assert each.params.thought == Thought(open="<think>", close="</think>", end=end, begun=begun)
    llm.chat(asked, SamplingParams(grammar=grammar.choice(["a"])))
    assert all("CHOICE" in str(each.params.grammar) for each in engine_of(llm).submitted[2:])
    form = SamplingParams(grammar=grammar.json_object())
    llm.chat(asked, form, tools=TOOLS)
    assert all(
        str(each.params.grammar).count("%json") == 1 + len(TOOLS) for each in engine_of(llm).submitted[-2:]
    )
    for fields, words in (
        ({"tools": [{"type": "function"}]}, r"tools\.0\.function: this field is required"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools: .* add occurs twice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"tool_choice": "required"}, "tool_choice: there are no tools to call"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls: Input should be a valid boolean"),
        (
            {"tools": TOOLS, "sampling_params": SamplingParams(grammar="start: /a/")},
            "grammar: .* can't call tools",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            llm.chat(asked, **fields)
    llm = make(tmp_path, monkeypatch, chat_template=ECHO)
    with pytest.raises(ValueError, match=r"tools: .*--tool-call-parser"):
        llm.chat(asked, tools=TOOLS)


def test_another_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
    llm = make(tmp_path, monkeypatch, chat_template=template)
    asked = [{"role": "user", "content": "hi"}]
    assert texts(llm.chat(asked)) == ["hi"]
    assert texts(llm.chat([asked, asked], chat_template_kwargs={"mood": "!"})) == ["hi!", "hi!"]
    with pytest.raises(ValueError, match=r"chat_template_kwargs\.tone: .*does not read it"):
        llm.chat(asked, chat_template_kwargs={"tone": "!"})
    with (
        patch.object(json, "loads", side_effect=AssertionError("the tokenizer's file is read again")),
        pytest.raises(ValueError, match=r"chat_template_kwargs\.mood: .*does not read it"),
    ):
        llm.chat(asked, chat_template="{{ messages[0].content }}", chat_template_kwargs={"mood": "!"})
    with pytest.raises(ValueError, match="chat_template must be text, found PosixPath"):
        llm.chat(asked, chat_template=tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate(""), "prompt must not be empty"),
        (lambda llm: llm.generate(["a", []]), r"prompts\[1\] must not be empty"),
        (
            lambda llm: llm.generate([[-1]]),
            rf"prompts\[0\] must hold token ids from 0 to {VOCAB - 1}, found -1",
        ),
        (lambda llm: llm.generate([[1], [VOCAB]]), rf"prompts\[1\] must hold token ids .*, found {VOCAB}"),
        (lambda llm: llm.generate([[1.5, 2]]), r"prompts\[0\] must hold token ids .*, found 1.5"),
        (lambda llm: llm.generate([[True, False]]), r"prompts\[0\] must hold token ids .*, found True"),
        (lambda llm: llm.generate([True, False]), "the prompt must hold token ids .*, found True"),
        (lambda llm: llm.generate([1, "a"]), "the prompt must hold token ids .*, found 'a'"),
        (lambda llm: llm.generate([1, np.array([1, 2])]), r"the prompt must hold .*, found \[1, 2\]"),
        (lambda llm: llm.generate(["a", None]), r"prompts\[1\] must be text or token ids, found NoneType"),
        (lambda llm: llm.generate([b"ab"]), r"prompts\[0\] must be text or token ids, found bytes"),
        (lambda llm: llm.generate(None), "prompts must be text, token ids or a list of them, found NoneType"),
        (
            lambda llm: llm.generate({"text": "a"}),
            r"the prompt must have the key prompt or .* found \['text'\]",
        ),
        (
            lambda llm: llm.generate([{"prompt": "a", "multi_modal_data": {}}]),
            r"prompts\[0\] must have the key .* found \['prompt', 'multi_modal_data'\]",
        ),
        (lambda llm: llm.generate(["a", "\ud800"]), r"prompts\[1\] must be text that UTF-8 can encode"),
        (
            lambda llm: llm.generate("a", {"seed": 1}),
            "sampling_params must be SamplingParams or .* found dict",
        ),
        (
            lambda llm: llm.generate(["a"], [None]),
            r"sampling_params\[0\] must be SamplingParams, found NoneType",
        ),
        (lambda llm: llm.generate(["a"], [{"seed": 1}]), r"sampling_params\[0\] must be .* found dict"),
        (
            lambda llm: llm.generate("a", [SamplingParams(prediction="\ud800")]),
            r"sampling_params\[0\].prediction must be text that",
        ),
        (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "as many as prompts: 2, found 1"),
        (lambda llm: llm.generate("a", SamplingParams(seed=13)), "seed: seed 13 is unlucky"),
        (lambda llm: llm.chat([]), "messages must not be empty"),
        (lambda llm: llm.chat([[]]), "messages must not be empty"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages must be a list, found dict"),
        (lambda llm: llm.chat("a"), "messages must be a list of messages such as"),
        (lambda llm: llm.chat([{"role": "user"}]), "messages.0.content: this field is required"),
        (
            lambda llm: llm.chat([{"role": "user", "content": [IMAGE]}]),
            "messages.0.content.0.type: Input should be 'text', found 'image_url'",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": "a", "tone": 1}]),
            "messages.0.tone: unknown field",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": "\ud800"}]),
            "messages.0.content: must be text that",
        ),
        (
            lambda llm: llm.chat([[{"role": "user", "content": "a"}], [7]]),
            "conversation 1: messages.0: must be an object, found 7",
        ),
        (lambda llm: llm.chat([{"role": "user", "content": "boom"}]), "no boom"),
    ],
)
def test_errors_name_the_thing(llm: LLM, call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(llm)
    assert not engine_of(llm).has_work
    assert texts(llm.generate("still here")) == ["still here"]


def test_settings_of_the_server_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, monkeypatch, request_timeout=5, max_body_bytes=9, port=30000, requests_all_greedy=True)
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert [words.split()[0] for words in said] == ["request_timeout", "max_body_bytes"]


def test_an_error_can_be_sent_to_another_process(llm: LLM) -> None:
    with pytest.raises(FieldError) as found:
        llm.chat(echo("a"), tools="x")  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.param) == (str(found.value), "tools")


def test_a_failure_aborts_the_others(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*unlucky"):
        llm.generate(["a" * 50, "b"], [SamplingParams(), SamplingParams(seed=13)])
    assert not engine_of(llm).has_work


def test_a_failure_says_whose_it_is(llm: LLM) -> None:
    chat, unlucky = [{"role": "user", "content": "a"}], SamplingParams(seed=13)
    with pytest.raises(ValueError, match=r"conversation 2: .*unlucky"):
        llm.chat([chat] * 3, [SamplingParams()] * 2 + [unlucky])
    with pytest.raises(ValueError, match="unlucky") as alone:
        llm.generate("b", unlucky)
    assert "prompts" not in str(alone.value)


def test_close(llm: LLM) -> None:
    engine = engine_of(llm)
    with llm as same:
        assert same is llm
    assert engine.closed
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate("a")


def test_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path, monkeypatch, skip_tokenizer_init=True) as llm:
        (found,) = llm.generate([5, 6])
        assert (found.text, found.token_ids) == ("", [5, 6, 256])
        with pytest.raises(ValueError, match="a prompt of text needs a tokenizer"):
            llm.generate("a")
        with pytest.raises(ValueError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "a"}])
        with pytest.raises(ValueError, match="stop needs a tokenizer"):
            llm.generate([5], SamplingParams(stop=["a"]))


def test_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="page_sise: unknown setting; the nearest known one is page_size"):
        make(tmp_path, monkeypatch, page_sise=1)
    with pytest.raises(ValueError, match=r"^model_path: /no/where does not exist"):
        LLM("/no/where")


def test_template_variables_that_are_none(llm: LLM) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs must be a dict, found str"):
        llm.chat([{"role": "user", "content": "a"}], chat_template_kwargs="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "words"), [([], "must not be empty"), ([5, VOCAB], f"found {VOCAB}"), ([-1], "-1")]
)
def test_ends_of_a_thought_that_are_no_tokens(end: list[int], words: str) -> None:
    params = SamplingParams(thinking_token_budget=2, thought=Thought(open="x", close="y", end=end))
    with pytest.raises(FieldError, match=f"thought.end.*{words}"):
        Capacity(context_length=9, pool_tokens=9, vocab_size=VOCAB, all_greedy=False).check([1], params)


def test_a_name_that_nobody_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, monkeypatch, served_model_name=("a",))
    assert "served_model_name" in caplog.text
