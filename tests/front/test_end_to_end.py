"""The real engine with the front, on tiny random checkpoints: speculation changes no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from specserve import LLM, SamplingParams, Speculation, grammar
from tests.front.fake_engine import VOCAB
from tests.front.fakes import byte_tokenizer
from tests.front.live import Live, live
from tests.front.processes import wait
from tests.reference.draft_models import make_eagle3
from tests.reference.models import make_llama

SHAPE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
SHAPE_FLAGS = [word for name, value in SHAPE.items() for word in ("--" + name.replace("_", "-"), str(value))]
PROMPTS = ["Name three colours.", "x", "A longer prompt, so that lengths differ between the requests."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("e2e") / "target", vocab=VOCAB, eos=256, branch_scale=0.1)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def draft(model: Path) -> Path:
    return make_eagle3(model.parent / "draft", model, agree=True)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float64", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def server(model: Path, draft: Path) -> Iterator[Live]:
    flags = ["--model-path", str(model), "--device", "cpu", "--dtype", "float64", *SHAPE_FLAGS]
    drafts = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    with live([*flags, *drafts], {}) as found:
        yield found


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_server_and_library_say_the_same(plain: LLM, client: openai.OpenAI, temperature: float) -> None:
    expected = plain.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=temperature, seed=3))
    found = client.completions.create(
        model="target",
        prompt=PROMPTS,
        max_tokens=40,
        temperature=temperature,
        seed=3,
        extra_body={"return_speculation": True},
    )
    assert [choice.text for choice in found.choices] == [output.text for output in expected]
    assert [choice.finish_reason for choice in found.choices] == [output.finish_reason for output in expected]
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(output.token_ids) for output in expected)
    assert found.usage.speculation["drafted"] > 0
    assert found.usage.speculation["mean_accepted_length"] > 1


def test_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    fields = {"model": "target", "messages": messages, "max_tokens": 30, "seed": 1, "logprobs": True}
    whole = client.chat.completions.create(**fields)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**fields, stream=True))  # type: ignore[call-overload]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    logprobs = [item.logprob for choice in choices if choice.logprobs for item in choice.logprobs.content]
    assert logprobs == pytest.approx([item.logprob for item in whole.choices[0].logprobs.content], abs=1e-9)
    assert choices[-1].finish_reason == whole.choices[0].finish_reason


def test_stop_string_trims_text_and_counts(plain: LLM, client: openai.OpenAI) -> None:
    (whole,) = plain.generate(PROMPTS[:1], SamplingParams(max_tokens=40, temperature=0))
    stop = next(pair for pair in map("".join, pairwise(whole.text[5:])) if "\ufffd" not in pair)
    (expected,) = plain.generate(PROMPTS[:1], SamplingParams(max_tokens=40, temperature=0, stop=[stop]))
    assert expected.text == whole.text[: whole.text.index(stop)]
    found = client.completions.create(
        model="target",
        prompt=PROMPTS[0],
        max_tokens=40,
        temperature=0,
        stop=stop,
        extra_body={"return_speculation": True},
    )
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "stop"
    assert found.usage is not None
    assert found.usage.completion_tokens == len(expected.token_ids)
    usage = found.usage.speculation  # the first token comes with the prompt
    assert usage["steps"] + usage["accepted"] + 1 == len(expected.token_ids)


def test_the_tokenizers_end_token_ends_an_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Though the model's files name another one."""
    path = make_llama(tmp_path, vocab=VOCAB, eos=65)
    byte_tokenizer().save_pretrained(path)
    with caplog.at_level("INFO"), LLM(str(path), dtype="float64", device="cpu") as llm:
        assert "end tokens: 65 (config.json, generation_config.json), 256 (the tokenizer)" in caplog.messages
        for token in (256, 65):
            (answer,) = llm.generate("x", SamplingParams(max_tokens=5, logit_bias={token: 100}))
            assert (answer.finish_reason, answer.text, answer.token_ids) == ("stop", "", [token])
        options = SamplingParams(grammar=grammar.regex("a+"), logit_bias={256: 100}, max_tokens=5)
        assert llm.generate("x", options)[0].text == "a"


def test_the_checkpoints_sampling_values_are_the_defaults(tmp_path: Path) -> None:
    """Of a library's calls and of a server's, which would otherwise sample at temperature 1."""
    path = make_llama(tmp_path / "model", vocab=VOCAB)
    byte_tokenizer().save_pretrained(path)
    fields = {"temperature": 0.6, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 9}
    (path / "generation_config.json").write_text(json.dumps(fields))
    with LLM(str(path), dtype="float64", device="cpu") as llm:
        (expected,) = llm.generate("x", SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=9))
        assert llm.generate("x")[0].token_ids == expected.token_ids
    greedy = ["--requests-all-greedy", "--model-path", str(path), "--dtype", "float64", "--device", "cpu"]
    with live(greedy, {}) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        found = client.completions.create(model="model", prompt="x", max_tokens=9)
    assert found.choices[0].text == expected.text
    assert server.noted(
        "requests that set none get temperature 0, top_k 1, repetition_penalty 1.3, max_tokens 9"
    )


def test_what_a_client_leaves_is_freed(server: Live, client: openai.OpenAI) -> None:
    for _ in range(5):
        with client.completions.create(model="target", prompt="abc", max_tokens=400, stream=True) as stream:
            next(iter(stream))
    client.completions.create(model="target", prompt="abc", max_tokens=2)
    engine = server.built.engine
    wait(lambda: engine.stats().running == engine.stats().waiting == 0, 5)
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    engine.check_idle()


def test_speculation_can_be_turned_off(model: Path, draft: Path, plain: LLM) -> None:
    expected = plain.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0))
    assert [output.speculation.drafted for output in expected] == [0, 0, 0]
    settings = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(draft)}
    with LLM(str(model), dtype="float64", device="cpu", **settings, **SHAPE) as llm:
        params = [
            SamplingParams(max_tokens=20, temperature=0, speculation=Speculation(enabled=enabled))
            for enabled in (True, False, True)
        ]
        found = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.speculation.drafted > 0 for output in found] == [True, False, True]


def test_draft_that_is_missing(model: Path) -> None:
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(model.parent)]
    with (
        pytest.raises((ValueError, OSError), match=rf"^{model.parent}"),
        live(["--model-path", str(model), *flags], {}),
    ):
        pass
