"""Makes every automatic choice, by copy, and says why.

``resolve_paths`` needs no model and is done first; ``resolve`` reads the model's configuration.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specserve.config.paths import resolve_paths
from specserve.config.settings import NO_OPS, Settings
from specserve.config.speculation import resolve_speculation, resolve_token_map

if TYPE_CHECKING:
    from specserve.models.config import ModelConfig

Notes = list[str]


def resolve(
    settings: Settings, model_config: ModelConfig, has_gpu: bool | None = None
) -> tuple[Settings, Notes]:
    """Returns a copy with every automatic choice made, and a note with the reason for each. ``has_gpu`` None: as this
    machine has.

    Raises ValueError naming the flag when a setting can't be honoured.
    """
    settings, notes = resolve_paths(settings)
    settings = _device(settings, has_gpu, notes)
    steps: list[Callable[[Settings, ModelConfig, Notes], Settings]] = [
        _dtype,
        _attention,
        _limits,
        _pool,
        _execution,
        resolve_speculation,
        resolve_token_map,
    ]
    for step in steps:
        settings = step(settings, model_config, notes)
    return settings, notes


def _device(settings: Settings, has_gpu: bool | None, notes: Notes) -> Settings:
    import torch

    has_cuda = torch.cuda.is_available() if has_gpu is None else has_gpu
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


def _attention(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    backend, device, dtype = settings.attention_backend, settings.device, settings.dtype
    if backend in ("triton", "flashinfer"):
        if device != "cuda":
            raise ValueError(f"--attention-backend {backend} needs a GPU; on {device} the backend is torch")
        if dtype == "float64":
            raise ValueError(f"--attention-backend {backend} has no float64; use torch")
        if reason := _unserved(model):
            raise ValueError(f"--attention-backend {backend}: {reason}; use torch")
    if backend == "flashinfer" and find_spec("flashinfer") is None:
        raise ValueError(
            "--attention-backend flashinfer needs the package flashinfer-python, which is not installed"
        )
    if backend == "auto":
        backend = "triton" if device == "cuda" and dtype != "float64" else "torch"
        why = f"the device is {device}, the dtype {dtype}"
        if backend == "triton" and (reason := _unserved(model)):
            backend, why = "torch", reason
        notes.append(f"attention_backend = {backend}: {why}")
    return replace(settings, attention_backend=backend)


def _unserved(model: ModelConfig) -> str | None:
    """Why Triton's kernels cannot serve the target. Whether they serve the draft is known once that is loaded."""
    from specserve_kernels.ops.attention.attention import (
        HEAD_DIMS,  # imports Triton, which a CPU does without
    )

    size = model.layers[0].head_dim
    return None if size in HEAD_DIMS else f"triton has heads of {HEAD_DIMS}, the model's are of {size}"


def _context_length(given: int | None, model: ModelConfig, notes: Notes) -> int:
    longest, limit = model.longest_context
    if given is not None and given > longest:
        raise ValueError(f"--context-length: the model's {limit} is {longest}, found {given}")
    if given is not None:
        return given
    notes.append(f"context_length = {longest}: the model's {limit}")
    return longest


def _limits(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    context = _context_length(settings.context_length, model, notes)
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
    between = settings.max_prefill_tokens_per_step
    return replace(
        settings,
        context_length=context,
        max_running_requests=running,
        chunked_prefill_size=chunk,
        max_prefill_tokens_per_step=chunk if between is None else between,
    )


def _pool(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    given, context = settings.max_total_tokens, settings.context_length
    assert context is not None
    if given is not None and given < settings.page_size:
        raise ValueError(
            f"--max-total-tokens: must hold a page of {settings.page_size} tokens, found {given}"
        )
    on_cpu = settings.device == "cpu"
    if given is None and not on_cpu:
        return settings
    why = f"{' on cpu' if on_cpu else ''}: max_total_tokens sizes the KV pool"
    settings = settings.without(["mem_fraction_static"], why, notes)
    if given is not None:
        return settings
    total = max(4 * context, 65536)
    notes.append(f"max_total_tokens = {total}: the device is cpu, the larger of 65536 and 4 contexts")
    return replace(settings, max_total_tokens=total)


def _graphs(settings: Settings, notes: Notes) -> Settings:
    """Which steps are captured: those of batches up to ``cuda_graph_max_bs``."""
    largest, running = settings.cuda_graph_max_bs, settings.max_running_requests
    assert running is not None
    if settings.attention_backend == "torch" and not settings.disable_cuda_graph:
        why = (
            "the device is cpu" if settings.device == "cpu" else "attention backend torch reads host lengths"
        )
        notes.append(f"disable_cuda_graph = True: {why}")
        settings = replace(settings, disable_cuda_graph=True)
    if settings.disable_cuda_graph:
        return settings.without(["cuda_graph_max_bs"], ": no graphs are captured", notes)
    if largest is None or largest > running:
        notes.append(f"cuda_graph_max_bs = {running}: max_running_requests")
        largest = running
    return replace(settings, cuda_graph_max_bs=largest)


def _execution(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    why = ": steps run as CUDA graphs of fused kernels, on a cpu as they are"
    settings = _graphs(settings, notes).without(NO_OPS, why, notes)
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
