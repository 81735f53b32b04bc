"""``LLM`` over a fake engine: order, forms of prompts, errors, and cleanup."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

import specserve.models.read_config
import specserve.process.assemble
from specserve import LLM, FunctionCall, RequestOutput, SamplingParams, grammar
from specserve.core import Capacity, FieldError, Thought
from specserve.frontend.tokenizer import Tokenizer
from specserve.layers.linear import PLAIN
from specserve.messages import Submit
from tests.front.fake_engine import CONTEXT, EOS, VOCAB, FakeEngine
from tests.front.fakes import byte_tokenizer

MODEL_CONFIG = SimpleNamespace(
    architecture="LlamaForCausalLM",
    longest_context=(CONTEXT, "max_position_embeddings"),
    dtype="float32",
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    weights=PLAIN,
)


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return make(tmp_path, monkeypatch)


def make(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    """An LLM whose engine repeats the prompt; long prompts end later than short ones that came after them."""
    byte_tokenizer().save_pretrained(path)
    monkeypatch.setattr(specserve.models.read_config, "load_model_config", lambda _: MODEL_CONFIG)
    monkeypatch.setattr(specserve.process.assemble, "create_scheduler", lambda *_: FakeEngine(_echo))
    return LLM(str(path), device="cpu", **settings)


def _echo(message: Submit) -> list[int]:
    return [*message.token_ids, 256]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def engine_of(llm: LLM) -> FakeEngine:
    assert isinstance(llm.engine, FakeEngine)
    return llm.engine


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


def test_prompts_of_all_forms_in_order(llm: LLM) -> None:
    assert texts(llm.generate("one")) == ["one"]
    assert texts(llm.generate(["a longer prompt", "b", [99, 100]])) == ["a longer prompt", "b", "cd"]
    (found,) = llm.generate([65, 66], SamplingParams(logprobs=1))
    assert (found.text, found.token_ids, found.prompt_token_ids) == ("AB", [65, 66, 256], [65, 66])
    assert (found.finish_reason, found.cached_tokens, found.speculation.steps) == ("stop", 4, 1)
    assert [item.token_id for item in found.logprobs or []] == [65, 66, 256]
    assert llm.generate([]) == []


def test_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(stop=["g"])]
    first, second = llm.generate(["abcd", "efgh and more"], params)
    assert (first.text, first.finish_reason) == ("ab", "length")
    assert (second.text, second.finish_reason, second.token_ids) == ("ef", "stop", list(b"efg"))
    assert second.logprobs is None
    assert len(engine_of(llm).aborted) == 1


@pytest.mark.parametrize(("greedy", "temperature"), [(True, 0.0), (False, 1.0)])
def test_temperature_without_params(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greedy: bool, temperature: float
) -> None:
    llm = make(tmp_path, monkeypatch, requests_all_greedy=greedy)
    found: list[float] = []
    submit = engine_of(llm).submit

    def keep(message: Submit) -> None:
        found.append(message.params.temperature)
        submit(message)

    monkeypatch.setattr(engine_of(llm), "submit", keep)
    llm.generate(["a", "b"])
    llm.chat([{"role": "user", "content": "hi"}])
    llm.generate("a", SamplingParams(temperature=0.5))
    assert found == [*[temperature] * 3, 0.5]


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
    assert texts(llm.chat([one, one], SamplingParams(max_tokens=4), progress=True)) == ["user", "user"]


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
ADD, NOW = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now"}'
CALLED = f"<think>hm</think>So: <tool_call>{ADD}</tool_call><tool_call>{NOW}</tool_call>"
ECHO = "{% if tools %}{% endif %}{{ messages[0].content }}"


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
        (lambda llm: llm.generate(["a", None]), r"prompts\[1\] must be text or token ids, found NoneType"),
        (lambda llm: llm.generate([b"ab"]), r"prompts\[0\] must be text or token ids, found bytes"),
        (lambda llm: llm.generate(None), "prompts must be text, token ids or a list of them, found NoneType"),
        (lambda llm: llm.generate({"prompt": "a"}), "prompts must be text, .* found dict"),
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
    with pytest.raises(ValueError, match="--model-path: /no/where does not exist"):
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


def test_a_call_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine_of(llm).run_once

    def run_during_a_call() -> Any:
        with pytest.raises(RuntimeError, match="takes one call at a time"):
            llm.generate(["b"])
        return run()

    monkeypatch.setattr(engine_of(llm), "run_once", run_during_a_call)
    assert texts(llm.generate(["a"])) == ["a"]
    monkeypatch.setattr(engine_of(llm), "run_once", run)
    assert texts(llm.generate(["b"])) == ["b"]


def test_a_name_that_nobody_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, monkeypatch, served_model_name=("a",))
    assert "served_model_name" in caplog.text
