"""The tokenizer of the bundled model: byte-level BPE with 4096 tokens, each digit a token of its own.

Runs of spaces become single tokens except for the last space, which joins the word after it. That keeps the
indentation of Python code short. A chat is `<|begin|>`, then for each message its role token, the content and
`<|end|>`; the generation prompt is `<|assistant|>`. A plain text is `<|begin|>` and the text.

Tools are listed in the system turn, an answer's calls are `<tool_call>` objects as Hermes writes them, and results come
in a turn of the user, each within `<tool_response>`. These marks are plain text of three or four tokens, not added
tokens: a grammar reads them like any other text, whatever it allows around them, while llguidance hides added tokens
from it; an answer's text has them without exceptions for what is special; and no entry of the vocabulary is taken.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .generators.common import Message

VOCABULARY = 4096
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT = range(6)
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": USER}
CONTEXT_LENGTH = 2048
PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)(?!\p{L})|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOLS = "# Tools\n\nFunctions that you may call are described within <tools></tools>, one a line:\n<tools>\n"
CALLS = (
    "</tools>\n\nWrite a call as a JSON object within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
)
_TEMPLATE = """{{- '<|begin|>' -}}
{%- if tools -%}
{{- '<|system|>' -}}
{%- if messages[0]['role'] in ('system', 'developer') -%}{{- messages[0]['content'] ~ '\\n\\n' -}}{%- endif -%}
{{- TOOLS -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- CALLS -}}{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{%- if not tools or not loop.first -%}{{- '<|system|>' ~ message['content'] ~ '<|end|>' -}}{%- endif -%}
{%- elif message['role'] == 'user' -%}{{- '<|user|>' ~ message['content'] ~ '<|end|>' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}
{%- if message['content'] or not message['tool_calls'] -%}{{- message['content'] -}}{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": ' -}}{{- call['function']['name'] | tojson -}}{{- ', "arguments": ' -}}
{%- if call['function']['arguments'] is string -%}{{- call['function']['arguments'] -}}
{%- else -%}{{- call['function']['arguments'] | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif message['role'] == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|user|>' -}}
{%- else -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_response>\\n' ~ message['content'] ~ '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|end|>' -}}{%- endif -%}
{%- else -%}{{- raise_exception('This model has no role ' ~ message['role'] ~ '.') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
CHAT_TEMPLATE = _TEMPLATE.replace("TOOLS", json.dumps(TOOLS)).replace("CALLS", json.dumps(CALLS))


def turns(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[tuple[int, str]]:
    """A conversation as the chat template writes it: role tokens, each with the text up to `<|end|>`."""
    found: list[tuple[int, str]] = []
    before = ""
    for message in messages:
        role, text = message["role"], message["content"]
        calls = [f"<tool_call>\n{_json(_call(call))}\n</tool_call>" for call in message.get("tool_calls", ())]
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if before == "tool":
                text = f"{found.pop()[1]}\n{text}"
        found.append((ROLES[role], "\n".join(filter(None, (text, *calls))) if calls else text))
        before = role
    if not tools:
        return found
    listed = TOOLS + "".join(f"{_json(tool)}\n" for tool in tools) + CALLS
    if found[0][0] == SYSTEM:
        return [(SYSTEM, f"{found[0][1]}\n\n{listed}"), *found[1:]]
    return [(SYSTEM, listed), *found]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer trained on the texts, which should be the mixture that the model will see."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = SPECIAL_TOKENS[BEGIN]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{begin} $A", pair=f"{begin} $A {begin} $B:1", special_tokens=[(begin, BEGIN)]
            ),
        ]
    )
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the texts give only {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that `transformers.AutoTokenizer.from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end, pad, *roles = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": pad,
        "additional_special_tokens": roles,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
