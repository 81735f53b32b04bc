"""A target and drafts of published sizes with random weights, which cost what trained ones cost and guess nothing.

Matrices are normal with a deviation of 0.02, vectors are ones. Next to ``cost_faithful.py``'s random pair:

- ``dspark``: a DSpark draft as DeepSpec publishes them, five layers like the target's, blocks of 7 that all draft, a
  vanilla Markov head of rank 256 and a confidence head that reads it too.
- ``medusa``: five heads of one block each, with scores of their own.
- ``standalone``: a tied model of Llama-3.2-1B's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.cost_faithful import Family, Maker, scramble, write
from benchmarks.widen import Named, Shape
from examples.bundled_model.save_target import target_config
from specserve.layers.decoder import LayerConfig
from specserve.models.checkpoint import building, file_tensors
from specserve.models.config import ModelConfig
from specserve.models.draft.block import BlockConfig, BlockHead
from specserve.models.draft.block_source import default_ids
from specserve.models.draft.medusa import MedusaHeads
from specserve.models.llama import LlamaModel
from specserve.models.read_config import load_model_config
from specserve.tools.train.block import block_config

LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 64, 128256, 0)
LAYERS, BLOCK, RANK = 5, 7, 256
HEADS = 5


def make(path: Path, shape: Shape, small: Shape, dtype: torch.dtype) -> None:
    """Write what is missing of the pair and its drafts, on the GPU if there is one. ``small``: the draft model's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not all((path / name / "config.json").exists() for name in ("target", "eagle3")):
        Maker(Family(), shape, dtype, device).random(path)
    target = load_model_config(path / "target")
    model = empty(target)
    drafts: dict[str, Callable[[], tuple[Named, dict[str, Any]]]] = {
        "dspark": lambda: block(model, dtype),
        "medusa": lambda: medusa(model, dtype),
        "standalone": lambda: standalone(model, small, dtype),
    }
    for name, draft in drafts.items():
        if not (path / name / "config.json").exists():
            tensors, config = draft()
            filled = ((n, torch.empty_like(t, dtype=dtype, device=device)) for n, t in tensors)
            write(scramble(filled), config, path / name)


def empty(config: ModelConfig) -> LlamaModel:
    """A model without data."""
    with building(torch.bfloat16, torch.device("meta")):
        return LlamaModel(config, 1)


def block(target: LlamaModel, dtype: torch.dtype) -> tuple[Named, dict[str, Any]]:
    hidden, layers = target.config.hidden_size, target.config.num_layers
    config = BlockConfig(
        layer=dataclasses.replace(target.config.layers[0], qk_norm=True),
        num_layers=LAYERS,
        rope=target.config.rope,
        taps=tuple(i + 1 for i in default_ids(layers, LAYERS)),
        block_size=BLOCK,
        mask_id=target.config.vocab_size - 1,
        after=True,
        levels=BLOCK,
        draft_vocab_size=target.config.vocab_size,
        correction="vanilla",
        rank=RANK,
        confidence=hidden + RANK,
    )
    with building(dtype, torch.device("meta")):
        head = BlockHead(config, layers, 1, target)
    return tensors_of(head), block_config(config, target.config, dtype)


def medusa(target: LlamaModel, dtype: torch.dtype) -> tuple[Named, dict[str, Any]]:
    """Under the authors' names: head i has its block, then its scores."""
    rows = target.config.vocab_size
    with building(dtype, torch.device("meta")):
        heads = MedusaHeads(target, HEADS, 1, bias=True, scorers=HEADS, rows=rows)

    def named(name: str) -> str:
        kind, head, rest = name.split(".", 2)
        return f"{head}.{rest}" if kind == "heads" else f"{head}.1.{rest}"

    return ((named(n), t) for n, t in tensors_of(heads)), {"medusa_num_heads": HEADS, "medusa_num_layers": 1}


def standalone(target: LlamaModel, small: Shape, dtype: torch.dtype) -> tuple[Named, dict[str, Any]]:
    eps = target.config.layers[0].rms_norm_eps
    layer = LayerConfig(
        small.hidden, small.inner, small.heads, small.kv_heads, small.head_dim, eps, input_size=small.hidden
    )
    config = dataclasses.replace(
        target.config, vocab_size=small.vocab, layers=(layer,) * small.layers, tie_word_embeddings=True
    )
    named = ((f"model.{name}", tensor) for name, tensor in tensors_of(empty(config)))
    return named, target_config(config, dtype)


def tensors_of(module: nn.Module) -> Named:
    return iter(file_tensors(module).items())


def read_bytes(path: Path, itemsize: float) -> float:
    """Of a target's or a draft model's weights that a step reads: layers of ``itemsize`` bytes a number, a head of 2.
    An embedding is read row by row."""
    model = empty(load_model_config(path))
    numbers = sum(each.numel() for each in model.layers.parameters())
    config = model.config
    return numbers * itemsize + 2 * config.vocab_size * config.hidden_size
