"""What does not fit together in the files of model, draft and tokenizer, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.check.memory import device_memory, expected_memory
from specserve.check.report import Report
from specserve.config import Settings, resolve
from specserve.frontend.tokenizer import Tokenizer
from specserve.layers.rotary import RopeConfig
from specserve.models.config import ModelConfig, load_model_config, read_json, rope_config

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
        config = Path(path) / "config.json"
        if config.exists():
            _draft(config, settings, model, report)


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
    report.memory = found = expected_memory(settings, model)
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


def _draft(source: Path, settings: Settings, model: ModelConfig, report: Report) -> None:
    """Speculators' files keep the layer's configuration in ``transformer_layer_config``."""
    config = {**read_json(source), **json.loads(settings.speculative_draft_config_override or "{}")}
    layer = {**(config.get("transformer_layer_config") or {}), **config}
    _sizes(layer, model, report)
    _taps(config, model, report)
    _rope(layer, rope_config(layer, source), model, report)
    longest, context = layer.get("max_position_embeddings"), settings.context_length
    if isinstance(longest, int) and context is not None and longest < context:
        report.remarks.append(
            f"draft: max_position_embeddings {longest}, the context is {context}: behind that the draft was "
            "probably not trained, and fewer of its guesses are accepted; texts don't change"
        )


def _sizes(draft: Mapping[str, Any], model: ModelConfig, report: Report) -> None:
    vocab, few = draft.get("vocab_size"), draft.get("draft_vocab_size")
    if vocab is not None and vocab not in (model.vocab_size, few):
        report.problems.append(
            f"draft: vocab_size {vocab}, the target's is {model.vocab_size}: it was made for another tokenizer, "
            "its tokens mean other words"
        )
    if isinstance(few, int) and few < model.vocab_size:
        report.remarks.append(
            f"draft: it knows {few} of {model.vocab_size} tokens: a text's other tokens are never guessed"
        )
    hidden = draft.get("target_hidden_size") or draft.get("hidden_size")
    if hidden is not None and hidden != model.hidden_size:
        report.problems.append(
            f"draft: made for a target of hidden_size {hidden}, this one's is {model.hidden_size}"
        )


def _taps(config: Mapping[str, Any], model: ModelConfig, report: Report) -> None:
    nested = config.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    taps = nested.get(name) or config.get(name) or []
    if any(not 0 <= tap <= model.num_layers for tap in taps):
        report.problems.append(
            f"draft: reads layers {taps}, the target has {model.num_layers}: it was made for a deeper one"
        )


def _rope(draft: Mapping[str, Any], rope: RopeConfig, model: ModelConfig, report: Report) -> None:
    if rope.theta == model.rope.theta:
        return
    given = draft.get("rope_theta") or (draft.get("rope_parameters") or {}).get("rope_theta")
    how = f"is {rope.theta:g}" if given else f"is not in its config, so {rope.theta:g}"
    report.remarks.append(
        f"draft: the rotary base {how}, the target's is {model.rope.theta:g}. Right for the published EAGLE heads, "
        "which were trained with 10000; a head trained with the target's base accepts less the longer the text, "
        "and needs rope_theta in its config.json"
    )
