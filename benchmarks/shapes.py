"""Write the ``config.json`` of a published shape and of an EAGLE-3 draft for it, for ``--load-format dummy``.

    python -m benchmarks.shapes gemma-3-12b DIR [--fp8]

Writes DIR/target and DIR/eagle3. ``shapes.json`` has the fields as published, less those that say nothing about speed;
``deepseek-r1-6-layers`` is R1 with 6 of 61 layers and 32 of 256 experts. The draft has one layer as wide as the
target's widest dense one, and 32,000 ids at most. ``--fp8``: weights in blocks of 128 x 128 with FP8's scales, as
vendors publish them.
"""

from __future__ import annotations

import argparse
import json
from math import gcd
from pathlib import Path
from typing import Any

from specserve.models.read_config import load_model_config

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "gate", "shared_expert_gate", "in_proj_a", "in_proj_b"],
}
DRAFT_VOCAB = 32_000


def write_shape(name: str, path: Path, fp8: bool = False) -> None:
    """Write ``path``/target and ``path``/eagle3."""
    target = SHAPES[name] | ({"quantization_config": FP8_BLOCKS} if fp8 else {})
    _write(path / "target", {"torch_dtype": "bfloat16", **target})
    _write(path / "eagle3", _draft_of(path / "target"))


def _draft_of(target: Path) -> dict[str, Any]:
    config = load_model_config(target, random="")
    layer = config.draft_layer
    heads = layer.hidden_size // 128
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": gcd(heads, layer.num_kv_heads),
        "head_dim": 128,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": min(DRAFT_VOCAB, config.vocab_size),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": 10000.0,
    }


def _write(path: Path, config: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(SHAPES))
    parser.add_argument("output", type=Path)
    parser.add_argument("--fp8", action="store_true")
    args = parser.parse_args()
    write_shape(args.name, args.output, args.fp8)


if __name__ == "__main__":
    main()
