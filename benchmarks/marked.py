"""The bundled model with its special tokens renamed to the marks of tool calls and reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from specserve.config.paths import BUNDLED_MODEL

MARKS: Mapping[str, int] = {"<tool_call>": 2, "</tool_call>": 3, "<think>": 4, "</think>": 5}
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function | tojson }};{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% if opened %}<think>\n{% endif %}{% endif %}"
)


def marked_model(folder: Path) -> Path:
    """Write the model and return where."""
    for file in BUNDLED_MODEL.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file)
    tokenizer = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    names = {token: text for text, token in MARKS.items()}
    for added in tokenizer["added_tokens"]:
        if added["id"] in names:
            before, added["content"], added["special"] = added["content"], names[added["id"]], False
            tokenizer["model"]["vocab"][added["content"]] = tokenizer["model"]["vocab"].pop(before)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
