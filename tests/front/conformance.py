"""The effect of every field of OpenAI's API: the cases that ``test_conformance.py`` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from specserve.frontend.conversation import Message
from specserve.frontend.fields import Refusal
from specserve.server.chat import ChatRequest
from specserve.server.completions import CompletionRequest
from specserve.server.protocol import StreamOptions

CHAT, COMPLETIONS = "chat", "completions"
BOTH = (CHAT, COMPLETIONS)
MODEL = "specserve-chat"
PROMPT = "def add(a, b):\n    return"
ASKED = {"role": "user", "content": "List 3 countries and their capitals."}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [ASKED], "max_tokens": 8, "seed": 7},
    COMPLETIONS: {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "seed": 7},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
TWICE = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "2"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
LIKELY = 300  # some token, made likely or impossible
HOT = {
    "temperature": 1.5,
    "max_tokens": 12,
    "ignore_eos": True,
    "logit_bias": {str(LIKELY): 17},
}  # it comes twice


class Seen(Protocol):
    """An answer to ``BASE`` with a case's fields. ``ask`` gets another one, with other fields."""

    route: str
    answer: Any

    @property
    def text(self) -> str: ...
    @property
    def texts(self) -> list[str]: ...
    def ask(self, **fields: Any) -> Seen: ...


Check = Callable[[Seen], None]


@dataclass(frozen=True)
class Case:
    """A value of a field. ``check`` checks its effect; ``refused``: words of the error if it is refused."""

    field: str
    given: Mapping[str, Any]
    check: Check | None = None
    refused: str = ""
    routes: tuple[str, ...] = BOTH

    @property
    def streams(self) -> bool:
        """Whether there is a stream of it, which has an effect."""
        once = {
            "best_of",
            "request_id",
            "rid",
            "prompt_logprobs",
        }  # or refused in a stream, or the id is taken
        return self.check is not same and not once & self.given.keys()

    def id(self, route: str) -> str:
        values = "-".join(f"{value}"[:80] for value in self.given.values())
        return f"{route}-{self.field}-{values}".replace("\n", " ")


# What the checks look for.


def same(seen: Seen) -> None:
    """It changes nothing."""
    assert seen.text == seen.ask().text


def in_the_prompt(seen: Seen) -> None:
    """The chat template writes it."""
    assert seen.answer.usage.prompt_tokens > seen.ask().answer.usage.prompt_tokens


def calls_in_the_prompt(seen: Seen) -> None:
    """Nothing else of the conversation says what the arguments were."""
    more = {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
    other = seen.ask(**messages(ASKED, {**CALLED, "tool_calls": [more]}, result("1", "x")))
    assert other.answer.usage.prompt_tokens > seen.answer.usage.prompt_tokens


def results_in_the_prompt(seen: Seen) -> None:
    """In the order of the calls."""
    prompts = [
        seen.ask(**messages(ASKED, TWICE, result("1", one), result("2", two)), return_token_ids=True)
        for one, two in (("x", "y"), ("y", "x"))
    ]
    assert prompts[0].answer.usage.prompt_tokens == seen.answer.usage.prompt_tokens
    assert prompts[0].answer.prompt_token_ids != prompts[1].answer.prompt_token_ids


def is_one(seen: Seen) -> None:
    assert seen.text == "1"


def differs(seen: Seen) -> None:
    assert seen.text != seen.ask().text


def greedy(seen: Seen) -> None:
    """Whatever the seed, the likeliest token."""
    assert seen.text == seen.ask(temperature=0).text


def deterministic_at_zero(seen: Seen) -> None:
    assert seen.text == seen.ask(temperature=0, seed=8).text


def random_when_hot(seen: Seen) -> None:
    assert len({seen.text, *(seen.ask(temperature=1.5, seed=seed).text for seed in (8, 9))}) == 3


def other_seeds_differ(seen: Seen) -> None:
    """That the same seed gives the same text is seen by asking in three ways."""
    texts = [seen.ask(temperature=1.5, seed=seed).text for seed in (11, 12, -(2**63))]
    assert len(set(texts)) == 3


def cut_at_5(seen: Seen) -> None:
    assert seen.answer.usage.completion_tokens == 5
    assert seen.answer.choices[0].finish_reason == "length"
    assert seen.ask().text.startswith(seen.text)


def not_generated(seen: Seen) -> None:
    assert (seen.text, seen.answer.usage.completion_tokens) == ("", 0)


def three_choices(seen: Seen) -> None:
    assert [choice.index for choice in seen.answer.choices] == [0, 1, 2]
    assert seen.texts[0] == seen.ask(temperature=1.5).text
    assert len(set(seen.texts)) > 1


def best_two_of_four(seen: Seen) -> None:
    all_four = seen.ask(n=4, best_of=4, logprobs=0, temperature=1.5).answer
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in all_four.choices]
    best = sorted(range(4), key=means.__getitem__, reverse=True)[:2]
    assert seen.texts == [all_four.choices[index].text for index in best]
    assert seen.answer.usage.completion_tokens == all_four.usage.completion_tokens


def stopped(seen: Seen) -> None:
    whole = seen.ask(stop=None, temperature=0, max_tokens=8).text
    assert "e" in whole
    assert seen.text == whole[: whole.index("e")]
    assert seen.answer.choices[0].finish_reason == "stop"


def all_one_token(seen: Seen) -> None:
    assert seen.answer.usage.completion_tokens == 8
    assert len(seen.text) % 8 == 0
    assert seen.text == seen.text[: len(seen.text) // 8] * 8


def penalised(seen: Seen) -> None:
    assert seen.text != seen.ask(**HOT).text


def penalised_from_the_second(seen: Seen) -> None:
    """It counts the answer's tokens, of which the first has none before it."""
    penalised(seen)
    assert seen.text[0] == seen.ask(**HOT).text[0]


def logprobs_of_chat(seen: Seen) -> None:
    content = seen.answer.choices[0].logprobs.content
    assert bytes(byte for item in content for byte in item.bytes).decode().startswith(seen.text)
    for item in content:
        assert len(item.top_logprobs) == 3
        values = [top.logprob for top in item.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert item.logprob <= values[0] <= 0
    alone = seen.ask(logprobs=True).answer.choices[0].logprobs.content
    assert [item.logprob for item in content] == pytest.approx([item.logprob for item in alone], abs=1e-4)


def logprobs_of_completions(seen: Seen) -> None:
    found = seen.answer.choices[0].logprobs
    assert "".join(found.tokens).startswith(seen.text)
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:index]) for index in range(len(lengths))]
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob
        assert len(top) in (2, 3)


def echoed(seen: Seen) -> None:
    plain = seen.ask(n=len(seen.texts))
    assert seen.texts == [PROMPT + text for text in plain.texts]
    assert seen.answer.usage.completion_tokens == plain.answer.usage.completion_tokens


def scored(seen: Seen) -> None:
    """As lm-evaluation-harness reads it: the prompt's logprobs are those that generating it would have."""
    found = seen.answer.choices[0].logprobs
    assert seen.text == PROMPT == "".join(found.tokens[1:])
    assert found.tokens[0] == "<|begin|>", "the tokenizer's own, which is not in the text"
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    places = zip(found.text_offset[1:], found.tokens[1:], strict=True)
    assert all(PROMPT[at:].startswith(token) for at, token in places)
    part = seen.ask(prompt=PROMPT[: found.text_offset[-1]], echo=False, logprobs=5, max_tokens=1, top_k=1)
    likeliest = part.answer.choices[0].logprobs.top_logprobs[0]
    for token, logprob in found.top_logprobs[-1].items():
        if token in likeliest:
            assert abs(likeliest[token] - logprob) < 1e-4
    assert set(likeliest) & set(found.top_logprobs[-1])


def answered_with_name(seen: Seen) -> None:
    assert seen.answer.model == "openai/Specserve-Chat"
    same(seen)


def as_system(seen: Seen) -> None:
    system = [{"role": "system", "content": "Be short."}, ASKED]
    assert seen.text == seen.ask(messages=system).text


def continues(seen: Seen) -> None:
    assert seen.answer.usage.prompt_tokens > seen.ask().answer.usage.prompt_tokens


def shorter(seen: Seen) -> None:
    assert seen.answer.usage.prompt_tokens < seen.ask().answer.usage.prompt_tokens


def without_vowels(seen: Seen) -> None:
    assert seen.text
    assert not set("aeiou") & set(seen.text)
    assert set("aeiou") & set(seen.ask().text)


def called_by_name(seen: Seen) -> None:
    assert seen.answer.id.removeprefix("chatcmpl-").removeprefix("cmpl-").startswith("name-")


def prompt_scored(seen: Seen) -> None:
    """The first token has none; each other has its own and the most likely ones."""
    whole = seen.answer if seen.route == CHAT else seen.answer.choices[0]
    first, *others = whole.model_extra["prompt_logprobs"]
    assert first is None
    assert len(others) == seen.answer.usage.prompt_tokens - 1
    for each in others:
        assert all(found["logprob"] < 0 and found["decoded_token"] for found in each.values())
        assert sorted(found["rank"] for found in each.values() if found["rank"]) in ([], [1], [1, 2], [2])


def two_prompts(seen: Seen) -> None:
    assert seen.texts == [seen.ask(prompt=prompt).text for prompt in ("a", "b")]


def of_ids(seen: Seen) -> None:
    assert seen.answer.usage.prompt_tokens == 3
    assert len(seen.texts) == 1


def of_two_lists(seen: Seen) -> None:
    assert len(seen.texts) == 2
    assert seen.texts[0] == seen.ask(prompt=[5, 6, 7]).text


def counts(seen: Seen) -> None:
    usage = seen.answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def with_ids(seen: Seen) -> None:
    """Whose text is the text."""
    ids = seen.answer.choices[0].token_ids
    assert len(ids) == seen.answer.usage.completion_tokens
    prompts = seen.answer if seen.route == CHAT else seen.answer.choices[0]
    assert len(prompts.prompt_token_ids) == seen.answer.usage.prompt_tokens
    assert (
        seen.ask(prompt=ids, max_tokens=0, echo=True).text == seen.text if seen.route == COMPLETIONS else ids
    )
    same(seen)


def stopped_with_it(seen: Seen) -> None:
    whole = seen.ask(temperature=0).text
    assert seen.text == whole[: whole.index("e") + 1]


def to_the_end(seen: Seen) -> None:
    assert seen.answer.usage.completion_tokens == 24
    assert seen.answer.choices[0].finish_reason == "length"


def ended_by_token(seen: Seen) -> None:
    assert (seen.text, seen.answer.usage.completion_tokens) == ("", 1)
    assert seen.answer.choices[0].finish_reason == "stop"


def at_least_4(seen: Seen) -> None:
    assert seen.answer.usage.completion_tokens == 5


def undrafted(seen: Seen) -> None:
    same(seen)
    assert seen.answer.usage.speculation["drafted"] == 0


def drafted(seen: Seen) -> None:
    same(seen)
    assert seen.answer.usage.speculation["drafted"] > 0
    assert seen.answer.usage.speculation["mean_accepted_length"] >= 1


def predicted(seen: Seen) -> None:
    same(seen)
    details = seen.answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens > 0) == (0, True)


def predicted_in_part(seen: Seen) -> None:
    """The answer itself as the prediction: its tokens are those that were predicted."""
    text = seen.ask().text
    again = seen.ask(prediction={"type": "content", "content": text})
    assert again.text == text == seen.text
    assert again.answer.usage.completion_tokens_details.accepted_prediction_tokens > 0


# The table.

NO_BEAMS = "there is no beam search"


def honoured(name: str, check: Check, *values: Any, **more: Any) -> list[Case]:
    return [Case(name, {name: value}, check, **more) for value in values]


def refused(name: str, words: str, *values: Any, **more: Any) -> list[Case]:
    return [Case(name, {name: value}, refused=words, **more) for value in values]


def messages(*given: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(given)}


def result(call: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call}


def user(**fields: Any) -> dict[str, Any]:
    return messages({**ASKED, **fields})


CHAT_ONLY: dict[str, Any] = {"routes": (CHAT,)}
TEXT_ONLY: dict[str, Any] = {"routes": (COMPLETIONS,)}
NEITHER = "not supported"
ONE = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 1}}}
CASES: list[Case] = [
    *honoured("model", answered_with_name, "openai/Specserve-Chat"),
    *refused("model", "no model 'gpt-4'", "gpt-4"),
    Case("messages", messages(ASKED, {"role": "assistant", "content": "1."}, ASKED), continues, **CHAT_ONLY),
    *refused("messages", "at least 1 item", [], **CHAT_ONLY),
    Case("messages[].role", messages({"role": "system", "content": "x"}, ASKED), continues, **CHAT_ONLY),
    Case("messages[].role", messages({"role": "developer", "content": "Be short."}, ASKED), as_system, **CHAT_ONLY),
    Case(
        "messages[].role",
        messages(ASKED, {"role": "tool", "content": "x", "tool_call_id": "1"}),
        refused="no call in the preceding assistant message has this id",
        **CHAT_ONLY,
    ),
    Case(
        "messages[].role",
        messages({"role": "function", "content": "x", "name": "f"}),
        refused="'system', 'developer', 'user', 'assistant' or 'tool'",
        **CHAT_ONLY,
    ),
    Case("messages[].content", user(content=[{"type": "text", "text": ASKED["content"]}]), same, **CHAT_ONLY),
    *(
        Case("messages[].content", user(content=[part]), refused="'text'", **CHAT_ONLY)
        for part in (
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            {"type": "file", "file": {}},
            {"type": "refusal", "refusal": "x"},
        )
    ),
    Case("messages[].name", user(name="Ann"), same, **CHAT_ONLY),
    Case(
        "messages[].tool_calls",
        messages(ASKED, CALLED, result("1", "x")),
        calls_in_the_prompt,
        **CHAT_ONLY,
    ),
    Case(
        "messages[].tool_call_id",
        messages(ASKED, TWICE, result("1", "x"), result("2", "y")),
        results_in_the_prompt,
        **CHAT_ONLY,
    ),
    Case(
        "messages[].tool_call_id",
        messages(ASKED, TWICE, {"role": "tool", "content": "x", "tool_call_id": "2"}),
        refused="the call '1' before '2' has no result",
        **CHAT_ONLY,
    ),
    Case("messages[].tool_call_id", user(tool_call_id="1"), refused="only in messages of the role tool", **CHAT_ONLY),
    *(
        Case(
            f"messages[].{name}",
            messages({"role": "assistant", "content": "x", name: value}),
            refused=NEITHER,
            **CHAT_ONLY,
        )
        for name, value in (
            ("refusal", "no"), ("audio", {"id": "x"}), ("function_call", {"name": "f", "arguments": "{}"}),
        )
    ),
    *honoured("prompt", two_prompts, ["a", "b"], **TEXT_ONLY),
    *honoured("prompt", of_ids, [5, 6, 7], **TEXT_ONLY),
    *honoured("prompt", of_two_lists, [[5, 6, 7], [8]], **TEXT_ONLY),
    *refused("prompt", "must not be empty", "", [], **TEXT_ONLY),
    *honoured("max_tokens", cut_at_5, 5),
    *honoured("max_tokens", not_generated, 0, **TEXT_ONLY),
    *refused("max_tokens", "greater than or equal to 1", 0, **CHAT_ONLY),
    Case("max_completion_tokens", {"max_completion_tokens": 5, "max_tokens": None}, cut_at_5, **CHAT_ONLY),
    *refused("max_completion_tokens", "must be equal to max_tokens", 5, **CHAT_ONLY),
    *honoured("temperature", deterministic_at_zero, 0),
    *honoured("temperature", random_when_hot, 1.5),
    *refused("temperature", "temperature must be in [0, 100]", -1, 101),
    *honoured("top_p", greedy, 1e-6),
    *honoured("top_p", same, 1),
    *refused("top_p", "top_p must be in (0, 1]", 0, 1.1),
    Case("n", {"n": 3, "temperature": 1.5}, three_choices),
    *refused("n", "128", 129),
    *refused("n", "greater than or equal to 1", 0),
    Case("best_of", {"best_of": 4, "n": 2, "temperature": 1.5}, best_two_of_four, **TEXT_ONLY),
    *honoured("best_of", same, 1, **TEXT_ONLY),
    Case("best_of", {"best_of": 1, "n": 2}, refused="must be at least n", **TEXT_ONLY),
    Case("best_of", {"best_of": 2, "stream": True}, refused="in a stream", **TEXT_ONLY),
    *(Case("stop", {"stop": stop, "temperature": 0}, stopped) for stop in ("e", ["zzz", "e"])),
    *refused("stop", "at most 16", ["a"] * 17),
    *honoured("priority", same, 0, 5, -1),
    *refused("priority", "less than or equal", 2**63),
    *honoured("seed", other_seeds_differ, 7),
    *refused("seed", "less than", 2**63),
    *(
        case
        for name in ("presence_penalty", "frequency_penalty")
        for case in (
            Case(name, {name: 2, **HOT}, penalised_from_the_second),
            *refused(name, f"{name} must be in [-2, 2]", 3),
        )
    ),
    *honoured("logit_bias", all_one_token, {str(LIKELY): 100}),
    *refused("logit_bias", "must be in [-100, 100]", {"5": 101}),
    Case("logprobs", {"logprobs": True, "top_logprobs": 3}, logprobs_of_chat, **CHAT_ONLY),
    *honoured("logprobs", logprobs_of_completions, 2, **TEXT_ONLY),
    *refused("logprobs", "less than or equal to 20", 21, **TEXT_ONLY),
    Case("top_logprobs", {"logprobs": True, "top_logprobs": 3}, logprobs_of_chat, **CHAT_ONLY),
    *honoured("top_logprobs", same, 0, **CHAT_ONLY),
    *refused("top_logprobs", "only with logprobs", 3, **CHAT_ONLY),
    *honoured("echo", echoed, True, **TEXT_ONLY),
    Case("echo", {"echo": True, "n": 2}, echoed, **TEXT_ONLY),
    Case("echo", {"echo": True, "logprobs": 5, "max_tokens": 0}, scored, **TEXT_ONLY),
    *honoured("echo", same, False, **TEXT_ONLY),
    *honoured("stream", same, False),
    Case("stream_options.include_usage", {}, counts),  # each stream of the tests asks for it
    Case("stream_options.continuous_usage_stats", {}, counts),  # and a test of its own
    *(
        Case(f"stream_options.{name}", {"stream_options": {name: True}}, refused="only with stream")
        for name in ("include_usage", "continuous_usage_stats")
    ),
    Case(
        "stream_options.include_obfuscation",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        refused=NEITHER,
    ),
    *honoured("response_format", same, {"type": "text"}, **CHAT_ONLY),
    *honoured("response_format", is_one, ONE, **CHAT_ONLY),
    *refused("response_format", "'text'", {"type": "structural_tag"}, **CHAT_ONLY),
    *refused("response_format", "json_schema: this field is required", {"type": "json_schema"}, **CHAT_ONLY),
    *honoured("structured_outputs", is_one, {"json": {"const": 1}}, {"regex": "1"}, {"choice": ["1"]}),
    *honoured("guided_json", is_one, {"const": 1}),
    *honoured("json_schema", is_one, '{"const": 1}'),
    *(case for name in ("guided_regex", "regex") for case in honoured(name, is_one, "1")),
    *honoured("guided_choice", is_one, ["1"]),
    *(case for name in ("guided_grammar", "ebnf") for case in honoured(name, is_one, 'root ::= "1"')),
    *honoured("user", same, "somebody"),
    *honoured("metadata", same, {"a": "b"}, {}, **CHAT_ONLY),
    *refused("metadata", "valid string", {"a": 1}, **CHAT_ONLY),
    *honoured("safety_identifier", same, "somebody", **CHAT_ONLY),
    *honoured("prompt_cache_key", same, "some key", **CHAT_ONLY),
    *refused("suffix", "insertion before a suffix is not available", "x", **TEXT_ONLY),
    *(
        case
        for name, reason, none, *values in (
            ("tools", "should have different names, f occurs twice", [], [TOOL, TOOL]),
            ("tool_choice", "no tools to call", "none", "required", {"type": "function", "function": {"name": "f"}}),
            ("tool_choice", "'none', 'auto' or 'required'", "auto", "any"),
            ("parallel_tool_calls", "valid boolean", False, 1),
            ("functions", "its newer name is tools", [], [{"name": "f"}]),
            ("function_call", "its newer name is tool_choice", "none", "auto"),
            ("modalities", "only text is supported", ["text"], ["text", "audio"]),
            ("audio", "only text is supported", None, {"format": "wav", "voice": "x"}),
            ("reasoning_effort", "the effort can't be set", "none", "low"), ("verbosity", "verbosity", "medium", "low"),
            ("web_search_options", "no web search", None, {}), ("moderation", "moderated", None, {"model": "x"}),
            ("store", "nothing is stored", False, True),
            ("service_tier", "no tiers", "auto", "flex", "priority"),
            ("prompt_cache_options", "prefix cache", None, {"mode": "implicit"}),
            ("prompt_cache_retention", "prefix cache", None, "24h"),
        )
        for case in (*honoured(name, same, none, **CHAT_ONLY), *refused(name, reason, *values, **CHAT_ONLY))
    ),
    *(
        case
        for name, reason, none, wrong in (
            ("length_penalty", NO_BEAMS, 1.0, 0.5), ("use_beam_search", NO_BEAMS, False, True),
        )
        for case in (*honoured(name, same, none), *refused(name, reason, wrong))
    ),
    *honoured("tools", in_the_prompt, [TOOL], **CHAT_ONLY),
    Case("tool_choice", {"tool_choice": "none", "tools": [TOOL]}, same, **CHAT_ONLY),
    *honoured("prediction", predicted, {"type": "content", "content": "zq zq zq"}),
    *honoured("prediction", predicted_in_part, {"type": "content", "content": [{"type": "text", "text": "1"}]}),
    *refused("prediction", "'content'", {"type": "other", "content": "x"}),
    *honoured("top_k", greedy, 1),
    *refused("top_k", "top_k must be in [-1", -2),
    *honoured("min_p", greedy, 1),
    *refused("min_p", "min_p must be in [0, 1]", 2),
    Case("repetition_penalty", {"repetition_penalty": 3, **HOT}, penalised),
    *refused("repetition_penalty", "repetition_penalty must be in [0.01, 100]", 0),
    Case("ignore_eos", {"ignore_eos": True, "temperature": 0, "max_tokens": 24}, to_the_end),
    Case(
        "stop_token_ids",
        {"stop_token_ids": [LIKELY], "logit_bias": {str(LIKELY): 100}},
        ended_by_token,
    ),
    *refused("stop_token_ids", "token ids must be from 0", [-1]),
    Case(
        "min_tokens",
        {"min_tokens": 4, "temperature": 0, "stop_token_ids": [LIKELY], "logit_bias": {str(LIKELY): 100}},
        at_least_4,
    ),
    *refused("min_tokens", "min_tokens must be in [0, 8]", 9),
    *honoured("skip_special_tokens", same, True, False),  # no answer here has one: test_completions.py
    Case(
        "include_stop_str_in_output",
        {"include_stop_str_in_output": True, "stop": "e", "temperature": 0},
        stopped_with_it,
    ),
    *honoured("include_stop_str_in_output", same, False),
    *honoured("return_token_ids", with_ids, True),
    *honoured("return_token_ids", same, False),
    *refused("thinking_token_budget", "--reasoning-parser", 64, **CHAT_ONLY),
    *honoured("reasoning_field", same, "reasoning_content", "reasoning", **CHAT_ONLY),
    *refused("reasoning_field", "'reasoning_content' or 'reasoning'", "thought", **CHAT_ONLY),
    *honoured("bad_words", without_vowels, ["a", "e", "i", "o", "u"]),
    *honoured("bad_words", same, []),
    *refused("bad_words", "none of them empty", [""]),
    *honoured("cache_salt", same, "pepper"),
    *refused("cache_salt", "at least 1 character", ""),
    *honoured("request_id", called_by_name, "name-1"),
    *refused("request_id", "pattern", "a b", "x" * 129),
    *honoured("rid", called_by_name, "name-2", **CHAT_ONLY),
    *honoured("rid", called_by_name, "name-3", **TEXT_ONLY),
    *refused("rid", "pattern", "a b", ""),
    *honoured("prompt_logprobs", prompt_scored, 0, 2),
    *refused("prompt_logprobs", "less than or equal to 20", 21),
    *honoured("add_special_tokens", same, True, **TEXT_ONLY),
    *honoured("add_special_tokens", shorter, False, **TEXT_ONLY),
    *honoured("add_special_tokens", same, False, **CHAT_ONLY),
    *refused("add_special_tokens", "the chat template writes them", True, **CHAT_ONLY),
    *honoured("separate_reasoning", same, True, False, **CHAT_ONLY),
    *honoured("stream_reasoning", same, True, **CHAT_ONLY),
    *refused("stream_reasoning", "reasoning is streamed as it comes", False, **CHAT_ONLY),
    *honoured("add_generation_prompt", same, True, **CHAT_ONLY),
    *honoured("add_generation_prompt", shorter, False, **CHAT_ONLY),
    *honoured("continue_final_message", same, False, **CHAT_ONLY),
    *refused("continue_final_message", "only if the last message is the assistant's", True, **CHAT_ONLY),
    Case(
        "continue_final_message",
        {**messages(ASKED, {"role": "assistant", "content": "1."}), "continue_final_message": True},
        continues,
        **CHAT_ONLY,
    ),
    *honoured("chat_template_kwargs", same, {}, {"enable_thinking": False}, **CHAT_ONLY),
    *refused("chat_template_kwargs", "does not read it", {"enable_thinking": True}, **CHAT_ONLY),
    *refused("chat_template_kwargs", "is set by the server", {"messages": []}, **CHAT_ONLY),
    Case("speculation", {"speculation": {"enabled": False}, "return_speculation": True}, undrafted),
    *refused("speculation", "greater than or equal to 0", {"max_draft_tokens": -1}),
    *honoured("return_speculation", drafted, True),
]  # fmt: skip

REFUSALS: dict[str, Refusal] = {
    **{f"messages[].{name}": refusal for name, refusal in Message.refused.items()},
    **{f"stream_options.{name}": refusal for name, refusal in StreamOptions.refused.items()},
    **CompletionRequest.refused,
    **ChatRequest.refused,
}
