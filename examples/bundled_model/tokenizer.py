"""The tokenizer of the bundled model: byte-level BPE with 4096 tokens, each digit a token of its own.

Runs of spaces become single tokens except for the last space, which joins the word after it. That keeps the
indentation of Python code short. A chat is `<|begin|>`, then for each message its role token, the content and
`<|end|>`; the generation prompt is `<|assistant|>`. A plain text is `<|begin|>` and the text.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 4096
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT = range(6)
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}
CONTEXT_LENGTH = 2048
PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)(?!\p{L})|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """{{- '<|begin|>' -}}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}{{- '<|system|>' -}}
{%- elif message['role'] == 'user' -%}{{- '<|user|>' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}
{%- else -%}{{- raise_exception('This model has no role ' ~ message['role'] ~ '.') -}}
{%- endif -%}
{{- message['content'] -}}{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


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
