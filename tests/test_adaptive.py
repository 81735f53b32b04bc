"""The controller inside the engine: the text stays the same, and the shape follows the value of drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import heldout_prompts
from specserve import LLM, SamplingParams
from specserve.config import make_settings, resolve, resolve_paths
from specserve.config.paths import BUNDLED_MODEL
from specserve.core import Speculation
from specserve.engine.shapes import candidate_shapes
from specserve.models.read_config import load_model_config
from specserve.process import phase
from specserve.speculation.control.adaptive import Batch, Controller
from specserve.speculation.shape import StepShape
from tests.engines import Checkpoints, by_levels, check_switching, drafting, priced

PROMPTS = heldout_prompts(BUNDLED_MODEL, 3, 12)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, speculation=Speculation(enabled=False)),
]


def texts(**settings: Any) -> tuple[list[list[int]], Counter[int]]:
    """Of three requests together, and how often each number of levels ran where any may draft."""
    levels: Counter[int] = Counter()
    choose = Controller.choose

    def counted(self: Controller, batch: Batch) -> StepShape:
        shape = choose(self, batch)
        if any(min(effect.cap, room) > 0 for effect, room in zip(batch.effects, batch.rooms, strict=True)):
            levels[shape.levels] += 1
        return shape

    with (
        patch.object(Controller, "choose", counted),
        LLM(
            skip_tokenizer_init=True, dtype="float64", max_running_requests=3, random_seed=0, **settings
        ) as llm,
    ):
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)], levels


def drafted(models: Checkpoints) -> dict[str, Any]:
    """Settings of a small model whose draft is adaptive."""
    return {
        "model_path": str(models.target),
        "speculative_draft_model_path": str(models.eagle3),
        "speculative_algorithm": "EAGLE3",
        "skip_tokenizer_init": True,
        "max_running_requests": 2,
    }


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts()[0]


@pytest.mark.parametrize(
    ("algorithm", "level"),
    [
        ("EAGLE3", 50.0),
        ("EAGLE3", 0.05),
        ("EAGLE", 0.05),
        ("MEDUSA", 0.05),
        ("MLP_SPECULATOR", 0.05),
        ("EAGLE3+SUFFIX", 0.05),
        ("DSPARK+NGRAM", 0.05),
    ],
)
def test_the_text_of_plain_decoding(algorithm: str, level: float, plain: list[list[int]]) -> None:
    """With each bundled draft where levels are cheap, and where they are dear. Without a bound, which the request that
    has no drafts would set to the others."""
    with priced(by_levels(level)):
        found, levels = texts(speculative_algorithm=algorithm, speculative_max_slowdown=None)
    assert found == plain
    assert (sum(levels.values()) > 2 * levels[0]) == (level < 1)


def test_nothing_is_drafted_where_a_request_has_one_token_left() -> None:
    prompts = [[5 + n, 6, 7] for n in range(8)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with (
        priced(by_levels(0.05)),
        LLM(skip_tokenizer_init=True, max_running_requests=2, speculative_algorithm="EAGLE3") as llm,
    ):
        assert {len(output.token_ids) for output in llm.generate(prompts, params)} == {2}
        assert llm.engine is not None
        assert list(llm.engine.stats().step_totals.shapes) == ["off"]


def test_what_a_step_gives_does_not_depend_on_the_shapes_before(agreeing: Checkpoints) -> None:
    shapes = [shape for shape in candidate_shapes(1) if shape.levels in (0, 2, 5)]
    prompts = [[5, 6, 7, 30], [30, 20, 4, 9], [12, 13, 14, 15, 40]]
    settings = drafted(agreeing) | {"dtype": "float64", "max_running_requests": 1}
    with priced(by_levels(1.0)), LLM(speculative_adaptive=True, **settings) as llm:
        assert check_switching(llm, prompts, shapes, 20) > 10


class Operators(TorchDispatchMode):
    """Count PyTorch's operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def counted(run: Callable[[], None]) -> float:
    """A clock that no other work on this machine moves: operators in place of seconds."""
    with Operators() as operators:
        run()
    return operators.count


def test_a_start_says_what_it_is_at(agreeing: Checkpoints) -> None:
    phases: list[str] = []
    token = phase.HEARS.set(phases.append)
    try:
        LLM(**drafted(agreeing)).close()
    finally:
        phase.HEARS.reset(token)
    assert phases == [
        "reading the model's weights",
        "reading the draft",
        "making the KV pool",
        "choosing threads",
        "measuring steps",
    ]
    page = (Path(__file__).parents[1] / "docs" / "operating.md").read_text()
    assert all(f"`{name}`" in page for name in phases)


def test_costs_are_measured_at_start(agreeing: Checkpoints) -> None:
    """No shape is given: the controller is on."""
    with (
        patch("specserve.engine.profile.host_seconds", counted),
        patch("specserve.engine.profile.EAGER_SECONDS", inf),
        LLM(**drafted(agreeing)) as llm,
    ):
        assert llm.engine is not None
        assert llm.engine.info.speculation == "adaptive"
        cost = llm.engine.policy.cost  # type: ignore[attr-defined]
        plain, one, eight = (
            cost.seconds(shape, 0)
            for shape in (StepShape.plain(1), StepShape(1, 2, 1, 1), StepShape(1, 9, 8, 1))
        )
        assert 100 < plain < one < eight
        assert 4 * (one - plain) < eight - plain, "levels were drafted"


def test_measuring_leaves_the_padding_row_alone(agreeing: Checkpoints) -> None:
    """Or padding would take drafts from requests."""
    with LLM(**drafted(agreeing)) as llm:
        assert llm.engine is not None
        state = llm.engine.runner.context.state
        slots = state.slots
        assert [int(c[state.dummy]) for c in (slots.limit, slots.draft_cap, slots.length)] == [0, 0, 1]


@pytest.mark.parametrize(("context", "page"), [(17, 16), (2, 1), (112, 64)])
def test_a_short_context(context: int, page: int, agreeing: Checkpoints) -> None:
    """Costs are measured after as many tokens as there may be."""
    with (
        patch("specserve.engine.profile.EAGER_SECONDS", inf),
        LLM(**drafted(agreeing), context_length=context, page_size=page) as llm,
    ):
        params = SamplingParams(temperature=0, max_tokens=min(20, context - 1), ignore_eos=True)
        assert len(llm.generate([[5]], params)[0].token_ids) == params.max_tokens


def test_a_shape_and_the_controller_exclude_each_other() -> None:
    given, _ = resolve_paths(
        make_settings(device="cpu", speculative_adaptive=True, **drafting("EAGLE3", shape=(3, 1, 4)))
    )
    with pytest.raises(ValueError, match="--speculative-num-steps fixes it"):
        resolve(given, load_model_config(Path(str(given.model_path))))
