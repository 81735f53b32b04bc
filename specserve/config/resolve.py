"""Makes every automatic choice, by copy, and says why.

``resolve_paths`` needs no model and is done first; ``resolve`` reads the model's configuration.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from specserve.config.paths import resolve_paths
from specserve.config.settings import Settings
from specserve.config.speculation import resolve_speculation

if TYPE_CHECKING:
    from specserve.models.config import ModelConfig

Notes = list[str]
UNAVAILABLE = "is not available in this version"


def resolve(settings: Settings, model_config: ModelConfig) -> tuple[Settings, Notes]:
    """Returns a copy with every automatic choice made, and a note with the reason for each.

    Raises ValueError naming the flag when a setting can't be honoured.
    """
    _refuse_unavailable(settings)
    settings, notes = resolve_paths(settings)
    steps: list[Callable[[Settings, ModelConfig, Notes], Settings]] = [
        _device,
        _dtype,
        _attention,
        _limits,
        _pool,
        _execution,
        resolve_speculation,
    ]
    for step in steps:
        settings = step(settings, model_config, notes)
    return settings, notes


def _refuse_unavailable(settings: Settings) -> None:
    if settings.enable_torch_compile:
        raise ValueError(f"--enable-torch-compile {UNAVAILABLE}")
    if settings.torch_compile_max_bs is not None:
        raise ValueError(f"--torch-compile-max-bs {UNAVAILABLE}: there is no --enable-torch-compile to limit")
    if settings.speculative_token_map is not None:
        raise ValueError(
            f"--speculative-token-map {UNAVAILABLE}: drafts use the vocabulary of their checkpoint"
        )
    if settings.speculative_draft_quantization == "fp8":
        raise ValueError(f"--speculative-draft-quantization fp8 {UNAVAILABLE}: accepted are auto and none")


def _device(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    import torch

    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch finds no CUDA device on this machine")
    if settings.device != "auto":
        return settings
    device = "cuda" if has_cuda else "cpu"
    notes.append(f"device = {device}: torch finds {'a' if has_cuda else 'no'} CUDA device")
    return replace(settings, device=device)


def _dtype(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    if settings.dtype != "auto":
        return settings
    if settings.device == "cpu":
        notes.append("dtype = float32: the device is cpu")
        return replace(settings, dtype="float32")
    known = ("bfloat16", "float16", "float64")
    dtype = model.dtype if model.dtype in known else "bfloat16"
    notes.append(f"dtype = {dtype}: the checkpoint's is {model.dtype}")
    return replace(settings, dtype=dtype)


def _attention(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    if settings.attention_backend in ("triton", "flashinfer"):
        raise ValueError(
            f"attention backend {settings.attention_backend!r} is not available: this version has torch alone"
        )
    if settings.attention_backend == "auto":
        notes.append("attention_backend = torch: the only one of this version")
    return replace(settings, attention_backend="torch")


def _limits(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    longest = model.max_position_embeddings
    context = settings.context_length
    if context is not None and context > longest:
        raise ValueError(
            f"--context-length: the model's max_position_embeddings is {longest}, found {context}"
        )
    if context is None:
        context = longest
        notes.append(f"context_length = {context}: the model's max_position_embeddings")
    on_cpu = settings.device == "cpu"
    running, chunk = settings.max_running_requests, settings.chunked_prefill_size
    if running is None:
        running = 16 if on_cpu else 256
        notes.append(f"max_running_requests = {running}: the device is {settings.device}")
    if chunk is None:
        chunk = 512 if on_cpu else 8192
        notes.append(f"chunked_prefill_size = {chunk}: the device is {settings.device}")
    elif chunk == -1:
        chunk = context
        notes.append(f"chunked_prefill_size = {chunk}: -1 was given, so no prompt is split")
    return replace(settings, context_length=context, max_running_requests=running, chunked_prefill_size=chunk)


def _pool(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    assert settings.context_length is not None
    given = settings.max_total_tokens
    if given is not None and given < settings.page_size:
        raise ValueError(
            f"--max-total-tokens: must hold a page of {settings.page_size} tokens, found {given}"
        )
    if given is not None or settings.device != "cpu":
        return settings
    total = max(4 * settings.context_length, 65536)
    notes.append(f"max_total_tokens = {total}: the device is cpu, the larger of 65536 and 4 contexts")
    return replace(settings, max_total_tokens=total)


def _execution(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    for flag, given in (
        ("--disable-cuda-graph", settings.disable_cuda_graph),
        ("--cuda-graph-max-bs", settings.cuda_graph_max_bs is not None),
    ):
        if given:
            notes.append(f"{flag} changes nothing: this version runs every step eagerly, without CUDA graphs")
    overlap, seed = settings.overlap_schedule, settings.random_seed
    if settings.disable_overlap_schedule:
        overlap = "off"
        notes.append("overlap_schedule = off: --disable-overlap-schedule was given")
    elif overlap == "auto":
        overlap = "on" if settings.device == "cuda" else "off"
        notes.append(f"overlap_schedule = {overlap}: the device is {settings.device}")
    if seed is None:
        seed = secrets.randbits(32)
        notes.append(f"random_seed = {seed}: none was given, drawn at start")
    return replace(settings, overlap_schedule=overlap, random_seed=seed)
