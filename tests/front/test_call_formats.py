"""The names of formats of calls and reasoning, and which one a chat template has."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from specserve.config import Settings, resolve_paths
from specserve.config.choices import CALL_FORMATS, REASONING_FORMATS
from specserve.constraints.marks import HARMONY
from specserve.frontend.answers import Formats
from specserve.frontend.parsers import json_calls, text_calls
from specserve.frontend.parsers.registry import FORMATS, choose_format


def test_settings_name_the_formats() -> None:
    assert tuple(FORMATS) == CALL_FORMATS
    for name in REASONING_FORMATS:
        assert Settings(reasoning_parser=name).reasoning_parser == name
    unread = Settings(skip_tokenizer_init=True, tool_call_parser="hermes", reasoning_parser="mimo")
    assert any(
        note.startswith("--tool-call-parser, --reasoning-parser has no effect")
        for note in resolve_paths(unread)[1]
    )
    with pytest.raises(
        ValueError,
        match=r"tool.call.parser.*auto, none, hermes, .*, llama3_json, mistral, pythonic, .*gemma4",
    ):
        Settings(tool_call_parser="longcat")
    with pytest.raises(ValueError, match=r"reasoning.parser.*none, qwen3, deepseek_r1, .*mimo"):
        Settings(reasoning_parser="longcat")


DEEPSEEK = "".join(json_calls.DEEPSEEK_MARKS)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>\n{}\n</tool_call>{% endif %}", "hermes"),
        ('{% if tools %}{"name": function name, "parameters": dictionary of{% endif %}', "llama3_json"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic"),
        ("{% if tools %}<|tool_call>call:{}<tool_call|>{% endif %}", "gemma4"),
        (
            "{% if tools %}<|start|>assistant to=f<|channel|>commentary json<|message|>{}<|call|>{% endif %}",
            "gpt-oss",
        ),
        ("{% if tools %}<tool_call></tool_call><function=f>{% endif %}", None),
        ("{% if tools %}<tool_call></tool_call><function=f><parameter=a>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call></tool_call>[TOOL_CALLS]{% endif %}", None),
        ("{% if tools %}<tool_call></tool_call><tool_calls>[]</tool_calls>{% endif %}", None),  # Apriel's
        (
            "{% if tools %}<tool_call>" + "".join(text_calls.GLM_MARKS[2:]) + "</tool_call>{% endif %}",
            "glm45",
        ),
        ("{% if tools %}<minimax:tool_call>{{ calls }}</minimax:tool_call>{% endif %}", "minimax_m2"),
        ("{% if tools %}" + DEEPSEEK + "{% endif %}", "deepseek_v31"),
        ("{% if tools %}" + DEEPSEEK + "```json{% endif %}", "deepseek_v3"),
        (DEEPSEEK, None),
        ("{% if tools %}<｜tool▁outputs▁begin｜>{% endif %}", None),
        ("{% if tools %}<{{ '｜DSML｜' }}function_calls>{{ m.tool_calls }}{% endif %}", "deepseek_v32"),
        ("{% if tools %}<{{ '｜DSML｜' }}tool_calls>{% endif %}", "deepseek_v4"),
        ("{% if tools %}<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}{% endif %}", "kimi_k2"),
        ("<tool_call></tool_call>", None),
        ("{% if tools %}f(){% endif %}", None),
        ("", None),
    ],
)
def test_auto(template: str, expected: str | None) -> None:
    chosen, why = choose_format("auto", template)
    assert (chosen and chosen.name) == expected
    assert why
    assert choose_format("none", template)[0] is None
    assert choose_format("qwen25", template)[0] is FORMATS["hermes"]


@pytest.mark.parametrize(
    ("calls", "setting"), [("auto", "auto"), ("none", "auto"), ("gpt-oss", "auto"), ("auto", "none")]
)
def test_channels_are_separated_by_default(
    calls: str, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the chat template or the calls that have them, as in vLLM. Other reasoning must be named."""
    of_channels = "" if calls == "gpt-oss" else "{{ tools }}<|channel|>commentary<|call|>"
    for template in (of_channels, "<think></think>"):
        tokenizer = Mock(template_text=template, encode_answer=lambda text: [*text.encode()], added={})
        format_ = choose_format(calls if template == of_channels else "auto", template)[0]
        found = Formats.of(tokenizer, format_, setting)
        assert (
            (found.close is not None)
            == (found.around == HARMONY)
            == (template == of_channels and setting == "auto")
        )
    assert caplog.text.count("its marks are no tokens of the tokenizer") == 1
