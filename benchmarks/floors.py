"""Floors of step times on one H200 with Llama-3.1-8B shapes in bfloat16, and the times of other servers.

Measured there: GEMMs of cuBLAS in a CUDA graph, device reads, and the servers' wall clock with random weights, 512
tokens in and 256 out, in milliseconds per step. A floor counts only GEMMs and reads of the KV cache; that of prefill
counts GEMMs and pairs of queries and keys. In bfloat16 its GEMMs are cuBLAS's up to 256 tokens, so a ratio is below 1
where another kernel or a later cuBLAS is faster. Above, and for prefill, they are arithmetic at the card's peak rate.
With quantized weights GEMMs read the bytes of weights and scales, and of the head in bfloat16, or take that arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.common import Shape
from specserve.engine.shapes import MAX_STEP_NODES
from specserve.models.read_config import load_model_config

READ_BYTES_PER_S = 4.23e12
GEMM_FLOPS = 790e12
LAYER_PARAMETERS, HEAD_PARAMETERS = 6.98e9, 0.525e9
TARGET_MS = {1: 3.98, 2: 4.10, 4: 4.12, 8: 4.14, 16: 4.20, 32: 4.30, 64: 4.40, 128: 4.81, 256: 7.27}
"""All GEMMs of the target, by tokens in the step."""
WEIGHT_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
"""Of a layer's weight by ``--quantization``. In 4 bits 128 inputs share a scale of two bytes; a scale an output is left
out."""
DRAFT_LAYER_MS, DRAFT_HEAD_MS, DRAFT_FC_MS = 0.134, 0.068, 0.032
"""EAGLE-3: layer and head of 32,000 rows once a level, fc once a step; flat from 1 to 32 tokens."""
DRAFT_PARAMETERS = 0.374e9
LAYERS, HIDDEN, KV_HEADS, HEAD_DIM = 32, 4096, 8, 128
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
"""Of one token in the target's cache, keys and values in bfloat16."""

PEERS_MS: dict[tuple[Shape | None, int], dict[str, float]] = {
    (None, 1): {"vLLM": 5.12, "SGLang": 4.85},
    (None, 16): {"vLLM": 5.47, "SGLang": 5.40},
    (None, 64): {"vLLM": 6.68, "SGLang": 6.71},
    (None, 256): {"vLLM": 13.98, "SGLang": 13.76},
    ((3, 1, 4), 1): {"vLLM": 6.01, "SGLang": 6.11},
    ((3, 1, 4), 16): {"vLLM": 6.56, "SGLang": 6.69},
    ((3, 1, 4), 64): {"vLLM": 10.72, "SGLang": 10.87},
    ((7, 1, 8), 1): {"vLLM": 7.11, "SGLang": 7.13},
    ((4, 4, 16), 1): {"SGLang": 7.36},
    ((5, 8, 32), 1): {"SGLang": 8.12},
    ((5, 8, 32), 16): {"SGLang": 20.09},
}
"""By shape and batch. vLLM 0.26 and SGLang 0.5.17; vLLM drafts chains alone."""
PREFILL_PEERS_MS = {(16, 512): {"fastest": 185.0, "slowest": 189.0}, (1, 512): {"vLLM": 16.2, "SGLang": 18.2}}
"""By prompts and tokens; of the 16 prompts the range of both servers."""


def gemm_ms(tokens: int, quantization: str = "none") -> float:
    """The target's GEMMs in a step: the table, lines between its points, arithmetic beyond it. With quantized weights,
    which cuBLAS does not take: the time to read them, or that of the arithmetic if it is longer."""
    if quantization != "none":
        read = LAYER_PARAMETERS * WEIGHT_BYTES[quantization] + 2 * HEAD_PARAMETERS
        arithmetic = _arithmetic_ms(LAYER_PARAMETERS + HEAD_PARAMETERS, tokens)
        return max(read / READ_BYTES_PER_S * 1e3, arithmetic)
    points = sorted(TARGET_MS)
    if tokens > points[-1]:
        return max(TARGET_MS[points[-1]], _arithmetic_ms(LAYER_PARAMETERS + HEAD_PARAMETERS, tokens))
    above = next((point for point in points[1:] if point >= tokens), points[-1])
    below = points[points.index(above) - 1]
    slope = (TARGET_MS[above] - TARGET_MS[below]) / (above - below)
    return TARGET_MS[below] + slope * (tokens - below)


def prefill_ms(prompts: int, tokens: int) -> float:
    """The layers over all tokens of each prompt, and pairs of queries and keys; the head, over last tokens alone, is
    left out."""
    pairs = prompts * tokens * (tokens + 1) / 2
    return _arithmetic_ms(LAYER_PARAMETERS, prompts * tokens) + _arithmetic_ms(2 * LAYERS * HIDDEN, pairs)


def kv_ms(context_tokens: int) -> float:
    """Reading the target's cache of this many tokens, all requests together."""
    return context_tokens * KV_BYTES / READ_BYTES_PER_S * 1e3


def draft_ms(shape: Shape, batch: int, context_tokens: int, quantization: str = "none") -> float:
    """All levels of an EAGLE-3 draft, each reading its own layer of the cache: in bfloat16, or in int8 for a quantized
    target."""
    levels, topk, _ = shape
    read, fc = DRAFT_LAYER_MS + DRAFT_HEAD_MS, DRAFT_FC_MS
    if quantization != "none":
        byte_ms = WEIGHT_BYTES["int8"] / READ_BYTES_PER_S * 1e3
        read, fc = DRAFT_PARAMETERS * byte_ms, 3 * HIDDEN**2 * byte_ms
    level = max(read, _arithmetic_ms(DRAFT_PARAMETERS, batch * topk))
    return levels * (level + kv_ms(context_tokens) / LAYERS) + fc


def step_ms(shape: Shape | None, batch: int, context: int, quantization: str = "none") -> float:
    """A step of ``batch`` requests with ``context`` tokens each; ``shape`` None is plain decoding.
    ``quantization``: of the target's weights."""
    nodes = 1 if shape is None else shape[2]
    tokens = max(batch, min(batch * nodes, MAX_STEP_NODES))
    target = gemm_ms(tokens, quantization) + kv_ms(batch * context)
    return target if shape is None else target + draft_ms(shape, batch, batch * context, quantization)


def applies(model_path: str | Path) -> bool:
    """Whether this is the model's shape and the machine that all figures here are of."""
    config = load_model_config(Path(model_path))
    layer = config.draft_layer
    sizes = config.num_layers, layer.hidden_size, layer.intermediate_size, layer.num_kv_heads, layer.head_dim
    on_gpu = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    return on_gpu and sizes == (LAYERS, HIDDEN, 14336, KV_HEADS, HEAD_DIM)


def _arithmetic_ms(parameters: float, tokens: float) -> float:
    return 2 * parameters * tokens / GEMM_FLOPS * 1e3
