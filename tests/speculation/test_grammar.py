"""Answers with a grammar are valid, and equal plain decoding with every drafter."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import jsonschema
import msgspec
import pytest

from specserve import LLM, SamplingParams, grammar
from specserve.constraints.matcher import Grammars
from specserve.speculation.control.cost import CostModel
from tests.engines import Checkpoints, Client, Shape, answer_one, make_scheduler

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
VERSION = r"v[0-9]{1,2}\.[0-9]{1,2}( beta)?"
CITIES = ["Paris", "Pisa", "Porto, in Portugal"]
GRAMMARS = {
    "schema": grammar.json_schema(PERSON),
    "regex": grammar.regex(VERSION),
    "choice": grammar.choice(CITIES),
    "lark": grammar.lark('start: "[" item ("," item)* "]"\nitem: /[a-c]{1,3}/'),
}
Drafts = tuple[str, Shape | None]
DRAFTS: dict[str, Drafts] = {
    "chain": ("EAGLE3", (4, 1, 5)),
    "tree": ("EAGLE3", (3, 3, 8)),
    "ngram": ("NGRAM", (4, 2, 9)),
    "adaptive": ("EAGLE", None),
}
PLAIN: Drafts = ("NONE", None)


def is_valid(kind: str, text: str) -> bool:
    if kind == "schema":
        jsonschema.validate(json.loads(text), PERSON)
        return True
    if kind == "choice":
        return text in CITIES
    pattern = VERSION if kind == "regex" else r"\[[abc]{1,3}(,[abc]{1,3})*\]"
    return re.fullmatch(pattern, text) is not None


def requests() -> list[tuple[str, str, SamplingParams]]:
    """Kind, prompt and parameters; every fifth is free."""
    made = []
    for index in range(10):
        kind = "free" if index % 5 == 4 else [*GRAMMARS][index % 4]
        params = SamplingParams(
            temperature=[0.0, 0.8, 1.3][index % 3],
            seed=index,
            max_tokens=60,
            grammar=GRAMMARS.get(kind),
            repetition_penalty=1.1 if index % 4 == 3 else 1.0,
        )
        made.append((kind, f"User: number {index}, please.\nAssistant: ", params))
    return made


def open_llm(models: Checkpoints, drafts: Drafts = PLAIN, **settings: Any) -> LLM:
    given = {
        "dtype": "float64",
        "cpu_threads": 1,
        "context_length": 128,
        **models.drafting(*drafts),
        **settings,
    }
    return LLM(str(models.target), **given)


def answers(models: Checkpoints, drafts: Drafts = PLAIN, **settings: Any) -> list[tuple[str, str | None]]:
    _, prompts, params = zip(*requests(), strict=True)
    with open_llm(models, drafts, context_length=256, **settings) as llm:
        found = llm.generate(list(prompts), list(params))
    return [(each.text, each.finish_reason) for each in found]


@pytest.fixture(scope="module")
def plain(small_chat: Checkpoints) -> list[tuple[str, str | None]]:
    return answers(small_chat)


def test_every_answer_that_ends_is_valid(plain: list[tuple[str, str | None]]) -> None:
    ended = 0
    for (kind, _, _), (text, reason) in zip(requests(), plain, strict=True):
        if kind != "free" and reason == "stop":
            assert is_valid(kind, text), (kind, text)
            ended += 1
    assert ended >= 5


@pytest.mark.parametrize(
    ("how", "overlap"),
    [("chain", "off"), ("tree", "on"), ("ngram", "on"), ("adaptive", "off")],
)
def test_drafts_change_no_text(
    how: str, overlap: str, plain: list[tuple[str, str | None]], small_chat: Checkpoints
) -> None:
    """In batches of 6, with and without a pool so small that requests are put back."""
    room: dict[str, Any] = {"max_total_tokens": 1024} if overlap == "on" else {}
    room |= {"max_running_requests": 6, "overlap_schedule": overlap, "page_size": 4}
    assert answers(small_chat, DRAFTS[how], **room) == plain


RECURSIVE = {
    "brackets": 'start: s\ns: "(" s ")" | "x" | s s |',
    "a limit of tokens": "start: a\na[max_tokens=3]: /[a-z]*/",
    "a schema of itself": grammar.json_schema({"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
                                               "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["brackets", "a limit of tokens"])
def test_drafts_change_no_text_of_odd_grammars(name: str, small_chat: Checkpoints) -> None:
    params = [
        SamplingParams(temperature=1.2, seed=i, max_tokens=16, grammar=RECURSIVE[name]) for i in range(8)
    ]
    found = []
    for drafts in (PLAIN, ("NGRAM", (3, 3, 8)), DRAFTS["tree"]):
        with open_llm(small_chat, drafts) as llm:
            found.append([each.text for each in llm.generate(["a"] * 8, params)])
    assert found[0] == found[1] == found[2]


def test_an_answer_that_its_grammar_can_not_follow(
    small_chat: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails alone; the one next to it, and the next with the same grammar, go on. Nothing of it is logged."""
    monkeypatch.setattr("specserve.constraints.matcher.MOST_ITEMS", 300)
    ambiguous, ends = 'start: s\ns: s s | "a" | s s s', dict.fromkeys(range(6), -100.0)
    params = SamplingParams(grammar=ambiguous, temperature=0, max_tokens=100, logit_bias=ends)
    free, few = SamplingParams(temperature=0, max_tokens=30), msgspec.structs.replace(params, max_tokens=1)
    for drafts in (PLAIN, ("NGRAM", None)):
        with open_llm(small_chat, drafts, dtype="float32") as llm:
            with pytest.raises(ValueError, match="the grammar can't follow the answer"):
                llm.generate(["a", "b"], [params, free])
            short, other = llm.generate(["b", "a"], [few, free])
        assert re.fullmatch("a+", short.text)
        assert len(other.token_ids) > 3
    assert "aaa" not in caplog.text


def test_drafts_do_not_move_the_token_that_a_grammar_fails_at(
    small_chat: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar holds up to there, and nothing follows."""
    monkeypatch.setattr("specserve.constraints.matcher.MOST_ITEMS", 1000)
    ambiguous = "start: s\ns: /[a-c]/ | s s | s s s | s s s s"
    params = [
        SamplingParams(
            grammar=ambiguous,
            temperature=temperature,
            seed=1,
            max_tokens=limit,
            logit_bias=dict.fromkeys(range(6), -100.0),
        )
        for temperature in (0.0, 1.0)
        for limit in (60, 4)  # and where it ends before
    ]
    found = []
    for drafts, overlap in (
        (PLAIN, "off"),
        (DRAFTS["ngram"], "off"),
        (DRAFTS["chain"], "on"),
        (("EAGLE3", (4, 4, 16)), "off"),
        (("EAGLE3", (4, 4, 16)), "on"),
    ):
        scheduler = small_chat.scheduler(
            *drafts, skip_tokenizer_init=False, context_length=128, overlap_schedule=overlap
        )
        answers = []
        for each in params:
            with patch.object(Grammars, "forget", autospec=True, side_effect=Grammars.forget) as forgotten:
                answer = answer_one(scheduler, [70], each)
            answers.append((answer.tokens, answer.finish_reason, answer.refused))
            assert forgotten.called or each.max_tokens == 4, (
                "what it filled up would be full for the next answer"
            )
        found.append(answers)
        scheduler.check_idle()
        assert scheduler.stats().violations == 0
    for tokens, _, refused in found[0][::2]:
        assert refused is not None
        assert "the grammar can't follow the answer" in refused
        assert 4 < len(tokens) < 60
    assert [reason for _, reason, _ in found[0][1::2]] == ["length"] * 2
    assert found == found[:1] * 5


def test_an_engine_refuses(agreeing: Checkpoints, small_chat: Checkpoints) -> None:
    """A grammar without a vocabulary, and one that is none."""
    refused = answer_one(make_scheduler(agreeing.target), [1], SamplingParams(grammar="start: /a/")).refused
    assert refused is not None
    assert "tokenizer.json" in refused
    with open_llm(small_chat) as llm, pytest.raises(ValueError, match="grammar: "):
        llm.generate("a", SamplingParams(grammar="start: b"))


def test_a_masked_step_is_no_measure_of_its_shape_without_masks(small_chat: Checkpoints) -> None:
    """The controller has costs of their own for them."""
    params = SamplingParams(temperature=0, max_tokens=20, grammar=GRAMMARS["schema"])
    with (
        open_llm(small_chat, ("NGRAM", None)) as llm,
        patch.object(CostModel, "observe", autospec=True) as observed,
    ):
        llm.generate("A person:", params)
    assert len(observed.call_args_list) > 3
    assert all(call.args[-1] is True for call in observed.call_args_list)


def test_nobody_waits_for_a_grammar(small_chat: Checkpoints) -> None:
    """While it is compiled others are answered, and who asked for it may leave."""
    scheduler = make_scheduler(small_chat.target, skip_tokenizer_init=False)
    params = SamplingParams(temperature=0, max_tokens=4)
    constrained = msgspec.structs.replace(params, grammar=GRAMMARS["choice"])
    client, compilation = Client(scheduler), Future[object]()
    with patch.object(Grammars, "compile", return_value=compilation):
        for rid in ("waits", "leaves"):
            client.submit(rid, [5], constrained)
    client.submit("free", [5], params)
    for _ in range(20):
        client.iterate()
    assert client.answers["free"].finish_reason == "length"
    assert scheduler.has_work
    assert scheduler.stats().waiting == 2
    scheduler.abort("leaves")
    compilation.set_result(None)
    assert client.run()["waits"].tokens
    assert not client.answers["leaves"].tokens
