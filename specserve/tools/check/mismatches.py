"""What does not fit together in the files of model, draft and tokenizer, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from specserve.config import Settings, resolve
from specserve.config.engine import EngineConfig
from specserve.frontend.tokenizer import Tokenizer
from specserve.models.config import ModelConfig
from specserve.models.draft.choices import read_draft_size, read_taps, read_target_width
from specserve.models.draft.geometry import (
    check_hidden_size,
    check_vocabulary,
    read_layer,
    read_rope,
    wants_own_embedding,
)
from specserve.models.draft.load import head_kind
from specserve.models.draft.override import FLAG, check_kind, parse_overrides
from specserve.models.draft.source import Source, open_source
from specserve.models.read_config import load_model_config
from specserve.tools.check.memory import device_memory, expected_memory
from specserve.tools.check.report import Report

T = TypeVar("T")
_NARROWER = {"float64": 0, "float32": 1, "bfloat16": 2, "float16": 2}


def find_mismatches(settings: Settings, report: Report) -> None:
    """``settings`` have local paths. Raises ValueError for what can't be read."""
    assert settings.model_path is not None
    model = load_model_config(Path(settings.model_path))
    settings = resolve(settings, model)[0]
    assert settings.model_path is not None
    assert settings.tokenizer_path is not None
    _dtype(settings, model, report)
    _ends(model, report)
    _memory(settings, model, report)
    if not settings.skip_tokenizer_init:
        _tokenizer(Tokenizer.load(settings.tokenizer_path, settings.trust_remote_code), model, report)
    path = settings.speculative_draft_model_path
    if path is not None and Path(path) != Path(settings.model_path):
        _draft(Path(path), settings, model, report)


def _dtype(settings: Settings, model: ModelConfig, report: Report) -> None:
    stored, served = model.dtype or "", settings.dtype
    if served != stored and _NARROWER[served] >= _NARROWER.get(stored, 9):
        why = ": values over 65504 overflow" if served == "float16" else ""
        report.remarks.append(f"dtype: the checkpoint is {stored}, served as {served}{why}; texts may differ")


def _ends(model: ModelConfig, report: Report) -> None:
    bad = [token for token in model.eos_token_ids if not 0 <= token < model.vocab_size]
    if bad:
        report.problems.append(f"end tokens {bad} are not among the model's {model.vocab_size} tokens")
    if not model.eos_token_ids:
        report.problems.append("the model names no eos_token_id: answers end at their length limit alone")


def _memory(settings: Settings, model: ModelConfig, report: Report) -> None:
    try:
        report.memory = found = expected_memory(EngineConfig.of(settings, model, cores=1))
    except ValueError:  # told by loading, which does not get further either
        return
    there, context = device_memory(settings.device), settings.context_length
    tokens, wanted = found.pool_tokens, found.weights + found.draft
    if settings.max_total_tokens is not None:
        wanted += found.pool
    if wanted > there or tokens == 0:
        report.problems.append(
            f"{settings.device} has {there / 2**30:.1f} GiB, {wanted / 2**30:.1f} GiB and more are needed: a smaller "
            "--dtype, model or --max-total-tokens fits"
        )
    elif context is not None and tokens < context:
        report.problems.append(
            f"the KV pool holds {tokens} tokens, a context {context}: longer requests are refused"
        )


def _tokenizer(tokenizer: Tokenizer, model: ModelConfig, report: Report) -> None:
    if tokenizer.token_bytes(model.vocab_size):
        report.problems.append(
            f"the tokenizer has more tokens than the model's {model.vocab_size}: prompts with them are refused"
        )
    for token in model.eos_token_ids:
        if text := tokenizer.decode([token]):
            report.remarks.append(f"end token {token} is no special one: answers would end with {text!r}")
    try:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except ValueError as error:
        report.remarks.append(f"chat is refused: {error}")


def _draft(path: Path, settings: Settings, model: ModelConfig, report: Report) -> None:
    """Reads what loading reads, by the same functions: what these refuse is a problem."""
    source = _tell(
        report, lambda: open_source(path, parse_overrides(settings.speculative_draft_config_override))
    )
    if source is None:
        return
    kind = _tell(report, lambda: head_kind(source, settings.speculative_algorithm))
    if kind is None:
        return
    _tell(report, lambda: check_kind(source.overrides, kind))
    _tell(
        report,
        lambda: check_vocabulary(source, model),
        "; it was made for another tokenizer, its tokens mean other words",
    )
    if kind == "EAGLE3":
        _eagle3(source, model, report)
    else:
        _tell(report, lambda: check_hidden_size(source, read_layer(source, 1), model))
    _rope(source, model, report)
    longest, context = source.config.get("max_position_embeddings"), settings.context_length
    if isinstance(longest, int) and context is not None and longest < context:
        report.remarks.append(
            f"draft: max_position_embeddings {longest}, the context is {context}: after that the draft was "
            "probably not trained, and fewer of its guesses are accepted; texts don't change"
        )


def _tell(report: Report, read: Callable[[], T], hint: str = "") -> T | None:
    """What ``read`` returns, None when it refuses."""
    try:
        return read()
    except ValueError as error:
        report.problems.append(f"draft: {error}{hint}")
        return None


def _eagle3(source: Source, model: ModelConfig, report: Report) -> None:
    _tell(report, lambda: read_taps(source, model))
    _tell(report, lambda: read_target_width(source, model), "; it was made for another target")
    _tell(report, lambda: wants_own_embedding(source, read_layer(source, 2), model))
    few = _tell(report, lambda: read_draft_size(source, model.vocab_size))
    if few is not None and few < model.vocab_size:
        report.remarks.append(
            f"draft: it knows {few} of {model.vocab_size} tokens: a text's other tokens are never guessed"
        )


def _rope(source: Source, model: ModelConfig, report: Report) -> None:
    rope = _tell(report, lambda: read_rope(source))
    if rope is None or rope.theta == model.rope.theta or "rope_theta" in source.overrides:
        return
    report.remarks.append(
        f"{source.notes[-1]}; the target's base is {model.rope.theta:g}. Right for the published EAGLE heads, which "
        "were trained with 10000; a head trained with the target's base accepts less the longer the text, and needs "
        f"{FLAG} '{{\"rope_theta\": {model.rope.theta:g}}}'"
    )
