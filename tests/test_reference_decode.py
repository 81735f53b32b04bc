"""The design's first promise on the references themselves: the same text with and without a drafter."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.reference import eagle, llama
from tests.reference.decode import DraftLogitsFn, Request, TargetFn, plain, speculative
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import load_checkpoint, make_llama

PROMPT = (1, 5, 9, 33)
COUNT = 10
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0, "seed": 7},
    "truncated": {
        "temperature": 1.3,
        "seed": 2**40 + 3,
        "choice": 2,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
    },
    "penalised": {
        "temperature": 0.8,
        "seed": 11,
        "presence": 1.0,
        "frequency": 0.7,
        "repetition": 1.3,
        "logit_bias": {3: 2.0, 8: -100.0},
        "ban": [0, 3],
        "ban_until": 10,
    },
}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle agrees": {"agree": True},
    "eagle random": {},
    "eagle3 agrees": {"agree": True},
    "eagle3 truncated": {"draft_vocab": 24, "agree": True},
}


def functions(directory: Path, name: str) -> tuple[TargetFn, DraftLogitsFn]:
    path = make_llama(directory / "target", branch_scale=0.04)
    make = make_eagle3 if name.startswith("eagle3") else make_eagle
    state, config = load_checkpoint(path)
    draft_files = load_checkpoint(make(directory / "draft", path, **DRAFTS[name]))
    draft = eagle.make_draft(*draft_files, llama.embedding_weight(state), llama.head_weight(state))

    @cache
    def run(tokens: tuple[int, ...]) -> llama.LlamaOutput:
        return llama.forward(state, config, tokens)

    def target(tokens: Any) -> Tensor:
        return run(tuple(tokens)).logits[-1]

    def draft_logits(committed: Any, drafted: Any) -> Tensor:
        features = eagle.features_of(draft, run(tuple(committed[:-1])))
        return eagle.target_vocab_logits(draft, committed, features, drafted)

    return target, draft_logits


@pytest.mark.parametrize("name", DRAFTS)
def test_same_text_with_any_drafter(name: str, tmp_path: Path) -> None:
    target, draft = functions(tmp_path, name)
    accepted = 0
    for params in PARAMS.values():
        request = Request(PROMPT, params)
        text, history = speculative(target, draft, request, COUNT, steps=3, topk=2, total_tokens=6)
        assert text == plain(target, request, COUNT)
        assert 1 + sum(step.accepted + 1 for step in history) >= COUNT
        accepted += sum(step.accepted for step in history)
    assert accepted >= (0 if name == "eagle random" else 8)


def test_an_oracle_is_accepted_whole(tmp_path: Path) -> None:
    """A drafter that is the target is accepted to full depth at any temperature: the noise is shared."""
    target, _ = functions(tmp_path, "eagle agrees")

    def oracle(committed: Any, drafted: Any) -> Tensor:
        return target([*committed, *drafted])

    for params in PARAMS.values():
        _, history = speculative(
            target, oracle, Request(PROMPT, params), COUNT, steps=4, topk=1, total_tokens=5
        )
        assert [step.accepted for step in history] == [4] * len(history)


def test_seed_choice_and_position_give_different_texts(tmp_path: Path) -> None:
    target, _ = functions(tmp_path, "eagle random")
    texts = [plain(target, Request(PROMPT, {"seed": s, "choice": c}), 6) for s, c in [(0, 0), (1, 0), (0, 1)]]
    assert len({tuple(text) for text in texts}) == 3
