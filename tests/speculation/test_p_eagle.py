"""P_EAGLE: published files load, one pass over several layers and masks drafts what a slow reading drafts, whatever
happened to the request before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from specserve_kernels import Pool
from torch import Tensor

from specserve.scheduler.scheduler import Scheduler
from specserve.speculation.context import Context, View
from specserve.speculation.drafters.p_eagle import PEagleDrafter
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape
from tests.engines import (
    Checkpoints,
    Client,
    SwitchingShapes,
    answer_one,
    context_of,
    make_scheduler,
    requests_of,
)
from tests.reference import tree
from tests.reference.block import set_fields
from tests.reference.decode import Request
from tests.reference.models import make_llama
from tests.reference.p_eagle import make_p_eagle, next_logits
from tests.reference.sampler import draft_log_probs
from tests.speculation.methods import PROMPT, check_drafts, scheduler_of
from tests.speculation.oracle import SAMPLING, pool_scores, reference_params

METHOD = "P_EAGLE"
CHAIN, TREE = (6, 1, 7), (3, 3, 9)
GREEDY = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=30)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with room for the published taps."""
    return make_llama(tmp_path_factory.mktemp("deep") / "target", layers=10)


PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "amazon's": ({"taps": None}, "before layers [2, 5, 7] (no list in its config: the default)"),
    "RedHatAI's": (
        {"dialect": "speculators", "taps": [2, 3, 5, 6, 8]},
        "before layers [2, 3, 5, 6, 8] (the list",
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_files(kind: str, deep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options, taps = PUBLISHED[kind]
    draft = make_p_eagle(tmp_path / "draft", deep, **options)
    shapes = {
        name: (list(tensor.shape), tensor.dtype)
        for name, tensor in load_file(draft / "model.safetensors").items()
    }
    states, first = len(options["taps"] or "lmh"), "midlayer" if kind == "amazon's" else "layers.0"
    assert shapes["mask_hidden"] == ([1, 1, states * 32], torch.bfloat16)
    assert shapes["fc.weight"] == ([32, states * 32], torch.bfloat16)
    assert shapes[f"{first}.self_attn.q_proj.weight"] == ([32, 64], torch.bfloat16)
    assert shapes["layers.3.self_attn.q_proj.weight"] == ([32, 32], torch.bfloat16)
    assert (shapes["embed_tokens.weight"][0], shapes["d2t"]) == ([64, 32], ([64], torch.int64))
    with caplog.at_level("INFO", "specserve"):
        scheduler = scheduler_of(METHOD, deep, draft, CHAIN)
    where = "ptd_token_id" if kind == "amazon's" else "mask_token_id"
    trained = (
        "P_EAGLE trains it" if kind == "amazon's" else "its config's embed_requires_grad: it was trained"
    )
    for note in (
        taps,
        f"reads token 61 as its mask (its config's {where})",
        f"its own ({trained})",
        "has 4 layers",
    ):
        assert note in caplog.text
    assert "tensors that are not read" not in caplog.text
    assert len(context_of(scheduler).pool.layers) == 10 + 4
    check_drafts(
        scheduler, CHAIN, "greedy", lambda committed, path: next_logits(draft, deep, committed, path)
    )


@pytest.mark.parametrize("fields", [{"norm_before_fc": True}, {"fc_norm": True}], ids=str)
def test_masks_pass_the_norms_of_states(
    fields: dict[str, bool], random_models: Checkpoints, tmp_path: Path
) -> None:
    target = random_models.target
    draft = make_p_eagle(tmp_path / "draft", target, dialect="speculators", **fields)
    norms = (
        {"input_norm.weight": 96}
        if "norm_before_fc" in fields
        else {f"fc_norm.{i}.weight": 32 for i in range(3)}
    )
    state = load_file(draft / "model.safetensors")
    state |= {name: torch.linspace(0.5, 2, size).bfloat16() for name, size in norms.items()}
    save_file(state, draft / "model.safetensors")
    check_drafts(
        scheduler_of(METHOD, target, draft, CHAIN),
        CHAIN,
        "greedy",
        lambda committed, path: next_logits(draft, target, committed, path),
    )


Seen = list[tuple[tuple[int, ...], Pool]]
"""What each step drafted after which tokens, of one request alone."""


@contextmanager
def right(text: Sequence[int]) -> Iterator[Seen]:
    """Record what is drafted, and let each step verify the text instead, so that all is accepted."""
    seen: Seen = []
    propose = PEagleDrafter.propose

    def recording(
        self: PEagleDrafter, context: Context, view: View, shape: StepShape, sampling: Sampling
    ) -> Pool:
        pool = propose(self, context, view, shape, sampling)
        length, row = int(view.slots.length_B[0]), int(view.slots.rows_B[0])
        seen.append((tuple(context.state.slots.tokens[row, : length + 1].tolist()), pool))
        following = torch.tensor([[*text[length + 1 :], *[0] * shape.levels][: shape.levels]])
        return replace(pool, tokens_BP=following)

    with patch.object(PEagleDrafter, "propose", recording):
        yield seen


def check_seen(seen: Seen, models: Checkpoints, draft: Path) -> int:
    """Each is what the slow reading drafts, or nothing. Returns how many are nothing."""
    request, nothing = Request((), reference_params(GREEDY, ())), 0
    for committed, found in seen:
        if not (found.scores_BP > -torch.inf).any():
            nothing += 1
            continue

        def log_probs(path: tuple[int, ...], committed: tuple[int, ...] = committed) -> Tensor:
            logits = next_logits(draft, models.target, committed, path)
            return draft_log_probs(logits, **request.context(committed + path))

        expected = tree.expand(log_probs, found.tokens_BP.shape[1], 1)
        assert found.tokens_BP[0].tolist() == [candidate.token for candidate in expected.candidates]
        torch.testing.assert_close(found.scores_BP[0], pool_scores(expected), atol=1e-9, rtol=0)
    return nothing


@pytest.fixture(scope="module")
def random_draft(random_models: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_p_eagle(tmp_path_factory.mktemp("p_eagle") / "draft", random_models.target, layers=3)


def scheduler_after(models: Checkpoints, draft: Path, **settings: Any) -> Scheduler:
    return scheduler_of(METHOD, models.target, draft, CHAIN, chunked_prefill_size=8, **settings)


@pytest.mark.parametrize("page_size", [1, 4])
def test_after_a_cached_prompt(page_size: int, random_models: Checkpoints, random_draft: Path) -> None:
    """The next turn of a conversation finds pages that steps filled, up to the last tokens that one emitted."""
    prompt = [(7 * i) % 64 for i in range(23)]
    text = [*prompt, *answer_one(make_scheduler(random_models.target), prompt, GREEDY).tokens]
    scheduler = scheduler_after(random_models, random_draft, page_size=page_size)
    with right(text) as first:
        answer = answer_one(scheduler, prompt, GREEDY)
    assert (answer.tokens, max(answer.runs)) == (text[23:], 7)
    turn = [*text, 5, 6]
    with right(turn) as second:
        answer = answer_one(scheduler, turn, msgspec.structs.replace(GREEDY, max_tokens=10))
    assert answer.cached_tokens == (len(text) - 1) // page_size * page_size
    assert len(second) > 6
    assert check_seen([*first, *second], random_models, random_draft) == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_after_a_preemption(page_size: int, random_models: Checkpoints, random_draft: Path) -> None:
    text = [*PROMPT, *answer_one(make_scheduler(random_models.target), PROMPT, GREEDY).tokens]
    scheduler = scheduler_after(random_models, random_draft, page_size=page_size)
    client = Client(scheduler)
    with right(text) as seen:
        client.submit("0", PROMPT, GREEDY)
        while len(client.answers["0"].tokens) < 15:
            client.iterate()
        (request,) = requests_of(scheduler)
        scheduler.preempt(request)  # what memory that is short does
        before = len(seen)
        answer = client.run()["0"]
    assert answer.tokens == text[len(PROMPT) :]
    assert 2 <= before < len(seen)
    assert check_seen(seen, random_models, random_draft) == 0


def test_after_plain_steps(random_models: Checkpoints, random_draft: Path) -> None:
    """A few passes catch up with what was emitted meanwhile, from the features that were kept."""
    params = msgspec.structs.replace(GREEDY, max_tokens=60)
    text = [*PROMPT, *answer_one(make_scheduler(random_models.target), PROMPT, params).tokens]
    scheduler = scheduler_after(random_models, random_draft)
    plain, drafted = StepShape.plain(1), StepShape(1, 7, 6, 1)
    scheduler.policy = SwitchingShapes([plain])  # type: ignore[assignment]
    shapes = iter([drafted, plain, drafted, *[plain] * 20, *[drafted] * 60])
    with right(text) as seen, patch.object(SwitchingShapes, "choose", lambda self, batch: next(shapes)):
        answer = answer_one(scheduler, PROMPT, params)
    assert answer.tokens == text[len(PROMPT) :]
    assert answer.runs[:29] == [1, 7, 1, 7, *[1] * 20, 1, 1, 1, 7, 7]
    assert check_seen(seen, random_models, random_draft) == 3


NAMES = "mask_token_id, pard_token, ptd_token_id"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ptd_token_id": None}, f"{NAMES}: one must be the id of the mask token"),
        ({"ptd_token_id": 64}, "ptd_token_id 64 is none of the target's 64 tokens"),
        ({"pard_token": "61"}, "pard_token must be a token id, found '61'"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
            r"config\.json: speculative_tokens must be a positive integer, found 0",
        ),
        ({"vocab_size": 80}, "vocab_size 80 does not fit the target's 64"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}},
            "tensor fc.weight has 96 columns, expected 64",
        ),
        (
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 16},
            "layer_types has sliding_attention with a window of 16 tokens, but a slot has",
        ),
    ],
    ids=range(7),
)
def test_what_does_not_fit(
    fields: dict[str, Any], words: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    draft = set_fields(make_p_eagle(tmp_path / "draft", random_models.target), **fields)
    with pytest.raises(ValueError, match=words):
        scheduler_of(METHOD, random_models.target, draft, (1, 1, 2))


def test_a_mask_token_can_be_given(random_models: Checkpoints, tmp_path: Path) -> None:
    """SpecForge's files don't say which it was."""
    draft, target = make_p_eagle(tmp_path / "draft", random_models.target), random_models.target
    override = {"speculative_draft_config_override": '{"mask_token_id": 61}'}
    scheduler = scheduler_of(METHOD, target, set_fields(draft, ptd_token_id=None), CHAIN, **override)
    set_fields(draft, ptd_token_id=61)
    check_drafts(
        scheduler, CHAIN, "greedy", lambda committed, path: next_logits(draft, target, committed, path)
    )


def test_other_drafts_are_named(agreeing: Checkpoints, random_models: Checkpoints, tmp_path: Path) -> None:
    target = random_models.target
    with pytest.raises(
        ValueError, match=r"holds an EAGLE3 head; .* is P_EAGLE, expected EAGLE3 or NAIVE_EAGLE"
    ):
        scheduler_of(METHOD, target, random_models.eagle3, (1, 1, 2))
    draft = make_p_eagle(tmp_path / "draft", target)
    with pytest.raises(ValueError, match=r"holds a P_EAGLE head; .* is EAGLE3, expected P_EAGLE"):
        scheduler_of("EAGLE3", target, draft, (1, 1, 2))
    with pytest.raises(ValueError, match=r"--speculative-num-steps: .* has at most 18 levels, found 19"):
        scheduler_of(METHOD, target, draft, (19, 1, 20))
    trained = make_p_eagle(tmp_path / "trained", target, dialect="speculators", depths=4)
    with pytest.raises(ValueError, match=r"has at most 4 levels, found 5"):
        scheduler_of(METHOD, target, trained, (5, 1, 6))
    state = load_file(draft / "model.safetensors")
    save_file(state | {"mask_hidden": torch.ones(1, 95)}, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor mask_hidden has shape \[1, 95\], expected 96 numbers"):
        scheduler_of(METHOD, target, draft, (1, 1, 2))
    del state["layers.2.self_attn.q_proj.weight"]
    save_file(state, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor layers\.2\.self_attn\.q_proj\.weight"):
        scheduler_of(METHOD, target, draft, (1, 1, 2))
