"""The perplexity of a text with the given settings, and without the quantization that they ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specserve.config import Settings
from specserve.config.engine import EngineConfig
from specserve.config.settings import FP8_KV
from specserve.core import SamplingParams
from specserve.engine.memory import device_memory, return_memory
from specserve.frontend.tokenizer import Tokenizer
from specserve.layers.formats.rounded import RoundedWeights
from specserve.messages import Failed, Submit
from specserve.process.assemble import resolve_engine
from specserve.process.worker import load_engine
from specserve.scheduler.scheduler import Scheduler
from specserve.tools.check.memory import expected_memory
from specserve.tools.check.report import Perplexity
from specserve.tools.files import read_text

FLAG = "--perplexity"
WINDOW = 2048  # tokens scored together, each given those before it in the window


def read_tokens(path: Path, tokenizer: Tokenizer | None) -> list[int]:
    """Return the file's tokens. Raises ValueError for fewer than two."""
    if tokenizer is None:
        raise ValueError(f"{FLAG}: needs a tokenizer, found --skip-tokenizer-init")
    tokens = tokenizer.encode(read_text(FLAG, path))
    if len(tokens) < 2:
        raise ValueError(f"{FLAG}: {path} must contain two tokens or more, found {len(tokens)}")
    return tokens


def score(engine: Scheduler, config: EngineConfig, tokens: Sequence[int]) -> Perplexity:
    """Score the text. Raises ValueError if that is impossible."""
    held = engine.info.max_total_tokens
    windows = _windows(tokens, min(WINDOW, config.context_length - 1, held - 1))
    return Perplexity(sum(len(each) - 1 for each in windows), len(windows[0]), _perplexity(engine, windows))


def compare(found: Perplexity, config: EngineConfig, given: Settings, tokens: Sequence[int]) -> Perplexity:
    """Score the text again without quantization, if ``config`` quantizes anything, or say why that is impossible. This
    loads a second engine, so the first one must not be referenced any more."""
    rounds = []
    if isinstance(config.model.weights, RoundedWeights):
        rounds.append(f"--quantization {config.model.weights.kind}")
    if config.kv_cache_dtype == FP8_KV:
        rounds.append(f"--kv-cache-dtype {FP8_KV}")
    if not rounds:
        return found
    found = replace(found, rounds=" and ".join(rounds))
    return_memory()
    plain = resolve_engine(replace(given, quantization="none", kv_cache_dtype="auto"))[2]
    plain = replace(plain, draft=None, shape=None, adaptive=False, largest_graph=None)
    plain = replace(plain, max_total_tokens=found.window + 1)
    memory, there = expected_memory(plain), device_memory(plain.device).total
    if (needed := max(memory.loading, memory.weights + memory.pool + memory.states)) > there:
        return replace(
            found,
            not_compared=f"{plain.device} has {there / 2**30:.1f} GiB, and the model without {found.rounds} needs "
            f"{needed / 2**30:.1f}; to compare, score it without on a device that holds it, or with --device cpu",
        )
    engine = load_engine(plain)
    try:
        return replace(found, plain=_perplexity(engine, _windows(tokens, found.window)))
    finally:
        engine.close()


def _windows(tokens: Sequence[int], size: int) -> list[list[int]]:
    """Cut the tokens into runs of ``size``; the last may be shorter."""
    runs = [list(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return [run for run in runs if len(run) > 1]


def _perplexity(engine: Scheduler, windows: Sequence[list[int]]) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for index, window in enumerate(windows):
        engine.submit(Submit(str(index), window, params))
    scores = list[float]()
    while engine.has_work:
        for message in engine.run_once():
            if isinstance(message, Failed):
                raise ValueError(f"{FLAG}: the text can't be scored: {message.message}")
            scores += [each.logprob for each in message.prompt_logprobs or []]
    return math.exp(-math.fsum(scores) / len(scores))
