"""DFLASH, DFLASH2, DSPARK and DOMINO: published files load, and drafts match a slow reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.engine.shapes import candidate_shapes
from specserve.methods import Drafts
from tests.engines import (
    Checkpoints,
    Shape,
    answer_all,
    answer_one,
    by_levels,
    make_scheduler,
    priced,
    record_drafts,
)
from tests.reference import block
from tests.reference.block import make_block, set_fields
from tests.speculation.methods import PROMPT, check_drafts, scheduler_of
from tests.speculation.oracle import SAMPLING

CHAIN, TREE = (4, 1, 5), (3, 3, 9)
DSPARK = {"markov_kind": "vanilla"}
MAKES: dict[str, tuple[str, dict[str, Any], Shape]] = {
    "z-lab": ("DFLASH", {}, CHAIN),
    "z-lab, a part of the block": ("DFLASH", {"layers": 1, "qk_norm": False}, (2, 3, 7)),
    "z-lab, the last layer": ("DFLASH", {"taps": (3, 0)}, TREE),
    "SpecForge": ("DFLASH", {"dialect": "SpecForge"}, TREE),
    "DeepSpec without heads": ("DFLASH", {"dialect": "DeepSpec"}, (5, 1, 6)),
    "speculators": ("DFLASH", {"dialect": "speculators", "draft_vocab": 24}, TREE),
    "DeepSpec, vanilla": ("DSPARK", {"dialect": "DeepSpec", **DSPARK}, (5, 1, 6)),
    "DeepSpec, a tree beside confidence": (
        "DSPARK",
        {"dialect": "DeepSpec", **DSPARK, "confident": "markov"},
        TREE,
    ),
    "DeepSpec, gated": ("DSPARK", {"dialect": "DeepSpec", "markov_kind": "gated"}, TREE),
    "DeepSpec, rnn": ("DSPARK", {"dialect": "DeepSpec", "markov_kind": "rnn"}, TREE),
    "SpecForge, rnn": ("DSPARK", {"dialect": "SpecForge", "markov_kind": "rnn"}, CHAIN),
    "DFlash2": ("DFLASH2", {"selected": 6}, TREE),
    "DFlash2, another name": ("DFLASH2", {"selected": 6, "group": 8, "suffix": ".weight"}, CHAIN),
    "Domino after the slot": ("DOMINO", {"dialect": "SpecForge", "domino_shift": True}, TREE),
    "Domino at the slot": ("DOMINO", {"dialect": "SpecForge", "domino_shift": False}, CHAIN),
    "speculators at the slot": (
        "DSPARK",
        {"dialect": "speculators", **DSPARK, "draft_vocab": 24},
        CHAIN,
    ),
}


@pytest.mark.parametrize("make", MAKES)
def test_drafts_are_those_of_the_slow_reading(make: str, random_models: Checkpoints, tmp_path: Path) -> None:
    """Every candidate of every step, from the first on."""
    method, options, shape = MAKES[make]
    draft = make_block(tmp_path / "draft", random_models.target, **options)
    for sampling in ("greedy", "penalised") if make in ("z-lab", "DeepSpec, rnn") else ("penalised",):
        check_drafts(
            scheduler_of(method, random_models.target, draft, shape, page_size=4),
            shape,
            sampling,
            lambda committed, path: block.next_logits(draft, random_models.target, committed, path),
        )


def test_the_slot_convention_is_read(
    random_models: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A speculators file of the DSpark layout says so; the log says what was read, and why."""
    draft = make_block(tmp_path / "draft", random_models.target, dialect="speculators", **DSPARK)
    set_fields(draft, sample_from_anchor=True)
    with caplog.at_level("INFO", "specserve"):
        scheduler = scheduler_of("DSPARK", random_models.target, draft, (5, 1, 6))
    assert "slot k of a block gives the token after it (its config's sample_from_anchor)" in caplog.text
    assert "before layers [1, 3] (aux_hidden_state_layer_ids [1, 3]: inputs of layers)" in caplog.text
    assert "DSPARK, blocks of 5 (mask token 61), 5 levels" in caplog.text
    check_drafts(
        scheduler,
        (5, 1, 6),
        "greedy",
        lambda committed, path: block.next_logits(draft, random_models.target, committed, path),
    )


@pytest.mark.parametrize("confident", [True, "markov"])
def test_confidence_scores_a_chain(confident: bool | str, random_models: Checkpoints, tmp_path: Path) -> None:
    target = random_models.target
    draft = make_block(tmp_path / "draft", target, dialect="DeepSpec", **DSPARK, confident=confident)
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=20)
    with record_drafts() as drafts:
        answer = answer_one(scheduler_of("DSPARK", target, draft, (5, 1, 6)), PROMPT, params)
    committed = [*PROMPT, answer.tokens[0]]
    tokens = drafts[0].pool.tokens_BP[0].tolist()
    likely = [block.confidence(draft, target, committed, tokens[:i]).log() for i in range(5)]
    torch.testing.assert_close(drafts[0].pool.scores_BP[0], torch.stack(likely).cumsum(0))


def test_a_shared_budget_goes_where_confidence_is(random_models: Checkpoints) -> None:
    """In larger batches chains share nodes: what the controller may choose, positions for a whole block included."""
    shapes = candidate_shapes(32, Drafts(most_levels=5, block=5))
    assert any(shape.nodes < shape.slots * (shape.levels + 1) for shape in shapes[1:])
    assert all(shape.reserve >= 5 and shape.levels <= 5 for shape in shapes[1:])


@pytest.mark.parametrize("method", ["DFLASH", "DSPARK"])
def test_few_levels_of_a_long_block(method: str, agreeing: Checkpoints) -> None:
    """A block takes more positions than the step's nodes, up to the end of each text."""
    dialect = "DeepSpec" if method == "DSPARK" else "z-lab"
    kind = "vanilla" if method == "DSPARK" else None
    draft = make_block(
        agreeing.target.parent / f"long {method}",
        agreeing.target,
        dialect=dialect,
        block=16,
        markov_kind=kind,
    )
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=40)
    work = [([3 + i, 9, 14], params) for i in range(3)]
    plain = answer_all(make_scheduler(agreeing.target, page_size=4), work)
    for pages in (4096, 96):  # of 4 tokens
        scheduler = scheduler_of(
            method, agreeing.target, draft, (1, 1, 2), page_size=4, max_total_tokens=pages, context_length=43
        )
        assert [a.tokens for a in answer_all(scheduler, work)] == [a.tokens for a in plain]


def test_the_controller_drafts_within_a_block(agreeing: Checkpoints) -> None:
    draft = str(agreeing.others["DSPARK"])
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=60)
    with torch.inference_mode(), priced(by_levels(0.1)):
        scheduler = make_scheduler(
            agreeing.target, speculative_algorithm="DSPARK", speculative_draft_model_path=draft
        )
        answer = answer_one(scheduler, PROMPT, params)
    assert answer.tokens == answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
    assert 1 < max(answer.runs) <= 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 48}, "hidden_size 48 does not fit the target's 32"),
        ({"vocab_size": 70}, "vocab_size 70 does not fit the target's 64"),
        ({"block_size": 1}, "block_size must be at least 2, found 1"),
        ({"block_size": None}, "block_size must be a positive integer, found None"),
        (
            {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [0]}},
            "mask_token_id must be a token id from 0 to 63, found 64",
        ),
        (
            {"dflash_config": {"mask_token_id": 6, "target_layer_ids": [0, 3]}},
            r"target_layer_ids \[0, 3\] do not fit a target of 3 layers: expected -1 to 2",
        ),
        (
            {"dflash_config": {"mask_token_id": 6, "target_layer_ids": [0]}},
            r"tensor fc.weight has shape \[32, 64\], expected \[32, 32\]",
        ),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 16},
            "with a window of 16 tokens, but a slot has .* expected a smaller --context-length",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported, expected None"),
        ({"layer_types": 3}, r"config\.json: layer_types must be a list, found 3"),
        ({"rope_parameters": 3}, r"config\.json: rope_parameters must be an object or null, found 3"),
    ],
    ids=range(11),
)
def test_what_does_not_fit(
    fields: dict[str, Any], words: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    draft = set_fields(make_block(tmp_path / "draft", random_models.target), **fields)
    with pytest.raises(ValueError, match=words):
        scheduler_of("DFLASH", random_models.target, draft, (1, 1, 2))


def test_other_drafts_are_named(agreeing: Checkpoints, tmp_path: Path) -> None:
    dspark, target = agreeing.others["DSPARK"], agreeing.target
    with pytest.raises(ValueError, match=r"holds a DSPARK draft; .* is DFLASH, expected DSPARK"):
        scheduler_of("DFLASH", target, dspark, (1, 1, 2))
    with pytest.raises(ValueError, match=r"holds no block draft: expected tensors hidden_norm\.weight"):
        scheduler_of("DFLASH", target, agreeing.eagle, (1, 1, 2))
    with pytest.raises(ValueError, match="has at most 4 levels, found 5"):
        scheduler_of("DFLASH", target, agreeing.others["DFLASH"], (5, 1, 6))
    draft = make_block(tmp_path / "draft", target)
    state = load_file(draft / "model.safetensors")
    save_file(state | {"logit_head.markov_w1.weight": torch.ones(2, 2)}, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"an early export \(logit_head\) in a block draft: not supported"):
        scheduler_of("DFLASH", target, draft, (1, 1, 2))


def test_weights_of_8_bits_and_copied_text(agreeing: Checkpoints) -> None:
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=30)
    expected = answer_one(make_scheduler(agreeing.target), PROMPT, params).tokens
    for method in ("DSPARK", "DSPARK+NGRAM", "DFLASH+SUFFIX"):
        draft = agreeing.others[method.partition("+")[0]]
        scheduler = scheduler_of(
            method, agreeing.target, draft, (3, 2, 9), speculative_draft_quantization="int8"
        )
        answer = answer_one(scheduler, PROMPT, params)
        assert answer.tokens == expected
        assert max(answer.runs) > 1
