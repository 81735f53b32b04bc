"""STANDALONE: a separate model drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from specserve.config.settings import Settings
from specserve.engine.profile import eager_seconds
from specserve.engine.shapes import candidate_shapes
from specserve.methods import Drafts
from specserve.models.draft.vocabulary import shared_tokens
from specserve.process.assemble import resolve_engine
from specserve.scheduler import observers
from specserve.speculation.shape import StepShape
from tests.engines import (
    Checkpoints,
    SwitchingShapes,
    answer_all,
    answer_one,
    context_of,
    make_scheduler,
)
from tests.front.fakes import byte_tokenizer
from tests.reference.models import make_llama
from tests.reference.quantized import quantize
from tests.reference.standalone import next_logits, other_model, resized
from tests.speculation.methods import PROMPT, check_drafts, scheduler_of
from tests.speculation.oracle import SAMPLING

METHOD = "STANDALONE"


def test_the_target_itself_is_always_right(
    random_models: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any batch, after any number of accepted tokens, in chunks and from a cached prompt: every guess at the same
    temperature is right as long as the draft's cache is."""
    monkeypatch.setattr(observers, "SHARES", (1.0,))
    scheduler = scheduler_of(
        METHOD, random_models.target, random_models.target, (4, 1, 5), page_size=4, chunked_prefill_size=8
    )
    prompts = [[(7 * i + k) % 64 for i in range(23)] for k in range(3)]
    params = msgspec.structs.replace(SAMPLING["warm"], max_tokens=41, ignore_eos=True)
    for _ in range(2):
        for answer in answer_all(scheduler, [(prompt, params) for prompt in prompts]):
            assert set(answer.runs[1:-1]) == {5}
    assert answer.cached_tokens == 20


@pytest.mark.parametrize("dialect", ["fp8 a tensor", "W4A16"])
def test_a_checkpoint_of_few_bits(dialect: str, tmp_path: Path) -> None:
    """As published, as a target's: that which drafts for itself is always right. Its weights are not rounded again."""
    shape: dict[str, Any] = {"hidden": 128, "inner": 128, "heads": 4, "kv_heads": 2, "layers": 2}
    model = quantize(make_llama(tmp_path / "plain", **shape), tmp_path / "model", dialect)
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=21, ignore_eos=True)
    rounds = {"speculative_draft_quantization": "int8"}
    answer = answer_one(scheduler_of(METHOD, model, model, (4, 1, 5), **rounds), PROMPT, params)
    assert set(answer.runs[1:-1]) == {5}


def test_it_proposes_again_after_steps_without_drafts(random_models: Checkpoints) -> None:
    """It catches up with what was emitted meanwhile, some tokens a step, and is then right as before."""
    scheduler = scheduler_of(METHOD, random_models.target, random_models.target, (4, 1, 5))
    plain, drafted = StepShape.plain(1), StepShape(1, 5, 4, 1)
    policy = SwitchingShapes([plain])
    scheduler.policy = policy  # type: ignore[assignment]
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=50, ignore_eos=True)
    shapes = iter([*[plain] * 12, *[drafted] * 100])
    with patch.object(SwitchingShapes, "choose", lambda self, batch: next(shapes)):
        answer = answer_one(scheduler, PROMPT, params)
    first = answer.runs.index(5)
    assert answer.runs[:first] == [1] * first
    assert 12 < first < 18
    assert set(answer.runs[first:-1]) == {5}
    assert answer.tokens == answer_one(make_scheduler(random_models.target), PROMPT, params).tokens


@pytest.mark.parametrize("algorithm", [METHOD, "STANDALONE+NGRAM"])
def test_the_controller_s_shapes(algorithm: str, agreeing: Checkpoints) -> None:
    """All are measured first, again and again, on the padding row."""
    with torch.inference_mode():
        scheduler = agreeing.scheduler(algorithm, None, max_running_requests=2)
        for slots in (1, 2):
            for shape in candidate_shapes(slots, Drafts("some" if "+" in algorithm else "none")):
                assert eager_seconds(context_of(scheduler), shape, 40 * slots) > 0
        params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=30)
        expected = answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
        for answer in answer_all(scheduler, [(PROMPT, params)] * 3):
            assert answer.tokens == expected


@pytest.mark.parametrize("vocab", [40, 80])
def test_vocabularies_of_other_sizes(vocab: int, random_models: Checkpoints, tmp_path: Path) -> None:
    """One tokenizer, and rows that are missing or of padding."""
    target, draft = tmp_path / "target", resized(tmp_path / "draft", random_models.target, vocab)
    target.mkdir()
    for file in random_models.target.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tokens = {"model": {"vocab": {f"t{i}": i for i in range(min(vocab, 64))}}}
    for directory in (target, draft):
        (directory / "tokenizer.json").write_text(json.dumps(tokens))
    scheduler = scheduler_of(METHOD, target, draft, (3, 3, 9), page_size=4, tokenizer_path=str(target))
    check_drafts(
        scheduler, (3, 3, 9), "greedy", lambda committed, path: next_logits(draft, (*committed, *path), 64)
    )


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    def made(name: str, **tokenizer: Any) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        if tokenizer:
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        return tmp_path / name

    ours = made("ours", model={"vocab": {"a": 0, "b": 1, "c": 2}}, added_tokens=[{"id": 3, "content": "<s>"}])
    more = made("more", model={"vocab": {"a": 0, "b": 1, "c": 2, "<s>": 3, "pad": 5}})
    assert shared_tokens(ours, more, 4, 6) == (4, "the tokenizers agree")
    assert (
        shared_tokens(
            ours, made("list", model={"vocab": [["a", -1], ["b", -2], ["c", -3], ["<s>", 0]]}), 8, 6
        )[0]
        == 6
    )
    for name, vocabulary, words in (
        ("swapped", {"a": 0, "c": 1, "b": 2, "<s>": 3}, "'b' is 2 there and 1 in"),
        ("fewer", {"a": 0, "b": 1, "c": 2}, "'<s>' is none there and 3 in"),
        ("other", {"a": 0, "b": 1, "c": 2, "</s>": 3}, "is none there and 3 in|is 3 there and none in"),
    ):
        with pytest.raises(ValueError, match=f"{name} has another tokenizer than the target: .*{words}"):
            shared_tokens(ours, made(name, model={"vocab": vocabulary}), 4, 4)
    nothing = made("nothing")
    assert shared_tokens(ours, nothing, 4, 4)[1].startswith(
        "the vocabularies have the same size; no tokenizers"
    )
    with pytest.raises(
        ValueError, match=r"has a vocabulary of 5 tokens, the target one of 4, and .*nothing has no"
    ):
        shared_tokens(ours, nothing, 4, 5)
    with pytest.raises(ValueError, match=r"model\.vocab must be an object of ids or a list"):
        shared_tokens(ours, made("odd", model={"vocab": 5}), 4, 4)
    for name, data in (("left", b"1"), ("right", b"2"), ("same", b"1")):
        (made(name) / "tokenizer.model").write_bytes(data)
    assert shared_tokens(made("left"), made("same"), 4, 5)[0] == 4
    with pytest.raises(ValueError, match=r"tokenizer\.model differs from"):
        shared_tokens(made("left"), made("right"), 4, 4)


def test_settings_that_do_not_fit(agreeing: Checkpoints, tmp_path: Path) -> None:
    given = {"model_path": str(agreeing.target), "speculative_algorithm": METHOD}
    with pytest.raises(ValueError, match=f"--speculative-draft-model-path: needed for .*{METHOD}"):
        resolve_engine(Settings(**given))
    given["speculative_draft_model_path"] = str(agreeing.target)
    with pytest.raises(
        ValueError, match=r"--speculative-token-map dynamic can't be used with .*its own head"
    ):
        resolve_engine(Settings(**given, speculative_token_map="dynamic"))
    override = {"speculative_draft_config_override": '{"rope_theta": 5}'}
    with pytest.raises(
        ValueError, match="rope_theta: fields of draft heads, but the draft of STANDALONE is a whole model"
    ):
        scheduler_of(METHOD, agreeing.target, agreeing.target, (2, 1, 3), **override)
    with pytest.raises(ValueError, match="has a vocabulary of 48 tokens, the target one of 64"):
        scheduler_of(METHOD, agreeing.target, other_model(tmp_path / "small", vocab=48), (2, 1, 3))
    with pytest.raises(ValueError, match="eagle"):
        scheduler_of(METHOD, agreeing.target, agreeing.eagle, (2, 1, 3))


def test_a_tokenizer_on_disk(tmp_path: Path) -> None:
    """As transformers writes it."""
    byte_tokenizer().save_pretrained(tmp_path / "one")
    byte_tokenizer().save_pretrained(tmp_path / "two")
    assert shared_tokens(tmp_path / "one", tmp_path / "two", 300, 320) == (300, "the tokenizers agree")


def test_its_layers_lie_after_the_target_s(random_models: Checkpoints, tmp_path: Path) -> None:
    context = context_of(
        scheduler_of(METHOD, random_models.target, other_model(tmp_path / "draft"), (2, 1, 3))
    )
    assert [(tuple(layer.shape[3:])) for layer in context.pool.layers] == [(2, 8)] * 3 + [(3, 8)] * 2
