"""Make every automatic choice on a copy of the settings, with a note on the reason.

``resolve_paths`` runs first and needs no model; ``resolve`` reads the model's configuration.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specserve.config.choices import DUMMY, NO_OPS
from specserve.config.notes import UNUSED, Notes
from specserve.config.settings import FP8_KV, ROUNDED, SETTINGS, Settings
from specserve.config.speculation import (
    resolve_slowdown,
    resolve_speculation,
    resolve_synthetic,
    resolve_token_map,
)

if TYPE_CHECKING:
    from specserve.models.config import ModelConfig


def resolve(
    settings: Settings, model_config: ModelConfig, has_gpu: bool | None = None
) -> tuple[Settings, Notes]:
    """Return a copy of the settings, which have local paths, with every automatic choice made, and a note with the
    reason for each. ``has_gpu`` None: check this machine.

    Raises ValueError naming a flag that can't be honoured.
    """
    notes: Notes = {}
    settings = _device(settings, has_gpu, notes)
    target = _ranks, _load_format, _dtype, _quantization, _attention, _kv_cache, _limits, _states, _pool
    drafts = resolve_speculation, resolve_slowdown, resolve_synthetic, resolve_token_map
    for step in (*target, _execution, _deterministic, *drafts):
        settings = step(settings, model_config, notes)
    return settings, notes


def _device(settings: Settings, has_gpu: bool | None, notes: Notes) -> Settings:
    import torch

    has_cuda = torch.cuda.is_available() if has_gpu is None else has_gpu
    if settings.device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch finds no CUDA device on this machine")
    if settings.device != "auto":
        return settings
    why = f"torch finds {'a' if has_cuda else 'no'} CUDA device"
    return settings.choose("device", "cuda" if has_cuda else "cpu", why, notes)


def _ranks(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    ranks, groups = settings.tensor_parallel_size, settings.expert_parallel_size
    if ranks == 1:
        settings = settings.without(["dist_timeout", "enable_expert_parallel"], ": there is one rank", notes)
    if settings.enable_expert_parallel:
        if groups not in (1, ranks):
            raise ValueError(
                f"--expert-parallel-size: must be {ranks} with --enable-expert-parallel, found {groups}"
            )
        groups = ranks
        settings = settings.choose("expert_parallel_size", groups, "--enable-expert-parallel", notes)
    if ranks % groups:
        raise ValueError(
            f"--expert-parallel-size: must divide --tensor-parallel-size {ranks}, found {groups}"
        )
    if groups > 1 and not any(layer.experts for layer in model.layers):
        flag = (
            "--enable-expert-parallel: must not be set"
            if settings.enable_expert_parallel
            else "--expert-parallel-size: must be 1"
        )
        raise ValueError(f"{flag} for {model.architecture}, which has no experts")
    if ranks > 1:
        from specserve.layers.ranks import Ranks  # imports torch, which the command line does not need

        model.on(Ranks(0, ranks, experts=groups))
        most = max(1, (os.cpu_count() or 1) // ranks)
        if (settings.cpu_threads or 1) > most:
            raise ValueError(
                f"--cpu-threads is of each rank: must be at most {most} with {ranks} ranks, found "
                f"{settings.cpu_threads}"
            )
    return settings


def _load_format(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    if settings.load_format in SETTINGS["load_format"].foreign:
        why = ": the checkpoint's files decide, safetensors or pytorch_model.bin"
        return settings.without(["load_format"], why, notes)
    if settings.load_format == DUMMY:
        notes["load_format = dummy: all weights are random, so texts mean nothing"] = UNUSED
    return settings


def _dtype(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    if settings.dtype != "auto":
        return settings
    if settings.device == "cpu":
        return settings.choose("dtype", "float32", "the device is cpu", notes)
    dtype = model.dtype if model.dtype in ("bfloat16", "float16", "float64") else "bfloat16"
    return settings.choose("dtype", dtype, f"the checkpoint's is {model.dtype}", notes)


def _quantization(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    given = settings.quantization
    if given == "none":
        return settings
    stored = model.weights.words
    if stored.startswith(f"{given}:"):
        return settings.without(["quantization"], f": the checkpoint is {stored}", notes)
    if stored:
        raise ValueError(
            f"--quantization {given}: the checkpoint is {stored}; use none, since weights are not quantized twice"
        )
    if given not in ROUNDED:
        raise ValueError(
            f"--quantization {given}: the checkpoint is not quantized; accepted are none, {', '.join(ROUNDED)}"
        )
    return settings


def _attention(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    if settings.attention_backend in SETTINGS["attention_backend"].foreign:
        settings = settings.without(["attention_backend"], ": this server has no such backend", notes)
    backend, device, dtype = settings.attention_backend, settings.device, settings.dtype
    if backend in ("triton", "flashinfer"):
        if device != "cuda":
            raise ValueError(f"--attention-backend {backend} needs a GPU; use torch on {device}")
        if dtype == "float64":
            raise ValueError(f"--attention-backend {backend} does not support float64; use torch")
        if reason := _triton_refusal(model):
            raise ValueError(f"--attention-backend {backend}: {reason}; use torch")
    if backend == "flashinfer":
        for what, there in {
            "attention sinks": any(layer.sinks for layer in model.layers),
            "capped scores": any(layer.softmax.cap is not None for layer in model.layers),
        }.items():
            if there:
                raise ValueError(
                    f"--attention-backend flashinfer: {what} are not passed to FlashInfer; use triton or torch"
                )
    if backend == "flashinfer" and find_spec("flashinfer") is None:
        raise ValueError(
            "--attention-backend flashinfer needs the package flashinfer-python, which is not installed"
        )
    if backend != "auto":
        return settings
    backend = "triton" if device == "cuda" and dtype != "float64" else "torch"
    why = f"the device is {device}, the dtype {dtype}"
    if backend == "triton" and (reason := _triton_refusal(model)):
        backend, why = "torch", reason
    return settings.choose("attention_backend", backend, why, notes)


def _states(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    sizes, requests = ["max_mamba_cache_size", "mamba_full_memory_ratio"], settings.max_running_requests
    if not model.states:
        return settings.without(["mamba_ssm_dtype", *sizes], ": no layer keeps a state", notes)
    if settings.mamba_ssm_dtype == "auto" and settings.dtype != "float64":
        settings = settings.choose("mamba_ssm_dtype", "float32", f"the dtype is {settings.dtype}", notes)
    if settings.disable_radix_cache:
        return settings.without(sizes, ": no prefix is cached", notes)
    given = settings.max_mamba_cache_size
    if given is None:
        return settings
    assert requests is not None
    if given <= requests:
        raise ValueError(
            f"--max-mamba-cache-size: expected more than the {requests} states of --max-running-requests, found "
            f"{given}; without cached prefixes, --disable-radix-cache, there are no others"
        )
    return settings.without(sizes[1:], ": max_mamba_cache_size says how many states are held", notes)


def _kv_cache(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    given, dtype = settings.kv_cache_dtype, settings.dtype
    if given == FP8_KV:
        if settings.attention_backend == "flashinfer":
            raise ValueError(
                f"--kv-cache-dtype {given}: not supported by --attention-backend flashinfer; use triton or torch"
            )
        return settings
    if given == "auto":
        return settings.choose("kv_cache_dtype", dtype, "the type of the computed keys and values", notes)
    if given != dtype:
        raise ValueError(
            f"--kv-cache-dtype {given}: keys and values are computed in --dtype {dtype}; accepted are auto, {dtype} "
            f"and {FP8_KV}"
        )
    return settings


def _deterministic(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    """Turn deterministic inference on where sums have a fixed order; see docs/architecture.md."""
    where = f"{settings.dtype} on {settings.device} by {settings.attention_backend}"
    given, holds = settings.enable_deterministic_inference, where == "bfloat16 on cuda by triton"
    if given and not holds:
        raise ValueError(
            "--enable-deterministic-inference needs --dtype bfloat16 and --attention-backend triton on a GPU, "
            f"found {where}"
        )
    if given or not holds:
        return settings
    return settings.choose("enable_deterministic_inference", True, f"always on for {where}", notes)


def _triton_refusal(model: ModelConfig) -> str | None:
    """Return why Triton's kernels can't run the target, None if they can. The draft is checked when it is loaded."""
    # Imports Triton, which a CPU does not need.
    from specserve_kernels.ops.attention.attention import HEAD_DIMS, LEAST_WINDOW, ROTATED

    for layer in model.layers:
        size, window, latent = layer.head_dim, layer.softmax.window, layer.latent
        if latent is not None:
            if latent.rank not in HEAD_DIMS or size not in ROTATED:
                return f"triton supports latents of {HEAD_DIMS} and {ROTATED} rotated channels"
        elif size not in HEAD_DIMS:
            return f"triton supports head sizes {HEAD_DIMS}, the model's is {size}"
        if window is not None and window < LEAST_WINDOW:
            return f"triton supports windows of at least {LEAST_WINDOW} tokens, the model's is {window}"
    return None


def _limits(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    on_cpu, where = settings.device == "cpu", f"the device is {settings.device}"
    longest, limit = model.longest_context
    if settings.context_length is None:
        settings = settings.choose("context_length", longest, f"the model's {limit}", notes)
    elif settings.context_length > longest:
        raise ValueError(
            f"--context-length: the model's {limit} is {longest}, found {settings.context_length}"
        )
    if settings.max_running_requests is None:
        most, why = 16 if on_cpu else 256, where
        states = settings.max_mamba_cache_size if model.states and not settings.disable_radix_cache else None
        if states is not None and states // 2 < most:
            most, why = states // 2, "half of max_mamba_cache_size"
        settings = settings.choose("max_running_requests", most, why, notes)
    if settings.watchdog_timeout is None:
        settings = settings.choose("watchdog_timeout", 3000.0 if on_cpu else 300.0, where, notes)
    chunk = settings.chunked_prefill_size
    if chunk is None:
        settings = settings.choose("chunked_prefill_size", 512 if on_cpu else 8192, where, notes)
    elif chunk == -1:
        why = "-1 was given, so no prompt is split"
        settings = settings.choose("chunked_prefill_size", settings.context_length, why, notes)
    between = settings.max_prefill_tokens_per_step or settings.chunked_prefill_size
    return replace(settings, max_prefill_tokens_per_step=between)


def _pool(settings: Settings, model: ModelConfig, notes: Notes) -> Settings:
    if all(layer.softmax.window is None for layer in model.layers):
        why = ": no layer has a sliding window"
        settings = settings.without(["disable_hybrid_kv_cache_manager"], why, notes)
    given = settings.max_total_tokens
    if given is None:
        return settings
    if given < settings.page_size:
        raise ValueError(
            f"--max-total-tokens: must be at least a page of {settings.page_size} tokens, found {given}"
        )
    return settings.without(["mem_fraction_static"], ": max_total_tokens sizes the KV pool", notes)


def _graphs(settings: Settings, notes: Notes) -> Settings:
    """Choose which steps are captured: those of batches up to ``cuda_graph_max_bs``."""
    largest, running = settings.cuda_graph_max_bs, settings.max_running_requests
    assert running is not None
    if settings.attention_backend == "torch" and not settings.disable_cuda_graph:
        why = (
            "the device is cpu"
            if settings.device == "cpu"
            else "the torch attention backend reads lengths on the host"
        )
        settings = settings.choose("disable_cuda_graph", True, why, notes)
    if settings.disable_cuda_graph:
        return settings.without(["cuda_graph_max_bs"], ": no graphs are captured", notes)
    if largest is None or largest > running:
        return settings.choose("cuda_graph_max_bs", running, "max_running_requests", notes)
    return settings


def _execution(settings: Settings, _: ModelConfig, notes: Notes) -> Settings:
    why = ": steps run as CUDA graphs of fused kernels, on a cpu eagerly"
    settings = _graphs(settings, notes).without(NO_OPS, why, notes)
    if settings.disable_overlap_schedule and settings.overlap_schedule != "off":
        why = "--disable-overlap-schedule was given"
        settings = settings.choose("overlap_schedule", "off", why, notes)
    elif settings.overlap_schedule == "auto":
        overlap, why = "on" if settings.device == "cuda" else "off", f"the device is {settings.device}"
        settings = settings.choose("overlap_schedule", overlap, why, notes)
    if settings.random_seed is None:
        seed = secrets.randbits(32)
        settings = settings.choose("random_seed", seed, "none was given, drawn at random", notes)
    return settings
