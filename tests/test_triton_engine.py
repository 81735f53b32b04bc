"""The whole engine on interpreted Triton kernels: the texts equal those of PyTorch's operations, in float32, and no
kernel reads too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

pytest.importorskip("triton")

import specserve_kernels.dispatch
import specserve_kernels.ops.attention.attention
from specserve_kernels.ops.device import H200, Limits

import specserve.speculation.sampler
from specserve.attention import ATTENTION
from specserve.attention.triton import TritonAttention
from specserve.core import SamplingParams
from specserve.methods import Lookahead
from specserve.speculation.sampler import TritonSampling
from tests.engines import Answer, Checkpoints, answer_all, drafting, make_scheduler
from tests.launches import followed
from tests.reference.draft_models import make_eagle3
from tests.reference.gemma4 import SMALL, make_assistant, make_gemma4
from tests.reference.glm import make_glm
from tests.reference.gpt_oss import make_gpt_oss
from tests.reference.models import make_gemma3, make_qwen3_5
from tests.test_latent import GROUPS
from tests.test_more_targets import MLA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter: log(0) is -inf
]

PROMPTS = [
    [3, 9, 27, 17, 5, 40],
    [1, 2, 1, 2, 1, 2, 1],
    [*range(20, 38)],
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=4),
    SamplingParams(
        temperature=0.7,
        seed=6,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={3: 2.0, 8: -100.0},
        top_k=20,
        max_tokens=4,
    ),
]


@pytest.fixture
def on_triton() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("with a GPU kernels are compiled: tests/test_gpu_step.py")
    # Few multiprocessors: the interpreter runs all programs that would fill them.
    few = Limits(8, H200.shared_bytes)
    with (
        patch.object(specserve_kernels.ops.attention.attention, "limits_of", lambda _: few),
        patch.object(specserve_kernels.dispatch, "runs_triton", lambda _: True),
        patch.object(specserve.speculation.sampler, "runs_triton", lambda _: True),
        patch.dict(ATTENTION, torch=ATTENTION["triton"]),
    ):
        yield


def answers(
    checkpoints: Checkpoints,
    algorithm: str,
    shape: tuple[int, int, int],
    params: Sequence[SamplingParams] = PARAMS,
    kv: str = "auto",
) -> list[Answer]:
    settings: dict[str, Any] = {"dtype": "float32", "page_size": 16, "kv_cache_dtype": kv}
    if algorithm == "LOOKAHEAD":
        sizes = Lookahead(2, 3, 1)
        assert sizes.shape == shape
        settings |= {f"speculative_lookahead_{name}": size for name, size in sizes._asdict().items()}
    scheduler = checkpoints.scheduler(algorithm, shape, **settings)
    return answer_all(scheduler, zip(PROMPTS, params, strict=True))


def with_predictions(found: list[Answer]) -> list[SamplingParams]:
    """One that is right, one with a wrong token, none."""
    right, other = found[0].tokens, found[1].tokens
    foretold = right, [*other[:2], 63, *other[3:]], None
    return [
        msgspec.structs.replace(each, prediction=tokens)
        for each, tokens in zip(PARAMS, foretold, strict=True)
    ]


@pytest.mark.parametrize(
    ("algorithm", "shape", "kv"),
    [
        ("EAGLE", (2, 1, 3), "fp8"),
        ("EAGLE3", (3, 2, 6), "auto"),
        ("DSPARK", (2, 2, 4), "fp8"),
        ("P_EAGLE", (2, 2, 4), "fp8"),
        ("SUFFIX", (3, 2, 6), "fp8"),
        ("LOOKAHEAD", (2, 3, 6), "auto"),
        ("MEDUSA+NGRAM", (2, 1, 3), "auto"),
    ],
)
def test_gives_the_texts_of_torch(
    algorithm: str,
    shape: tuple[int, int, int],
    kv: str,
    agreeing_32: Checkpoints,
    request: pytest.FixtureRequest,
) -> None:
    texts = answers(agreeing_32, algorithm, shape, kv=kv)
    params = with_predictions(texts)
    expected = answers(agreeing_32, algorithm, shape, params, kv)
    assert [answer.tokens for answer in expected] == [answer.tokens for answer in texts]
    request.getfixturevalue("on_triton")
    with (
        patch.object(
            TritonAttention, "plan_draft", autospec=True, side_effect=TritonAttention.plan_draft
        ) as drafts,
        patch.object(TritonSampling, "choose", autospec=True, side_effect=TritonSampling.choose) as choices,
        followed() as launches,
    ):
        found = answers(agreeing_32, algorithm, shape, params, kv)
    assert bool(drafts.call_count) == (algorithm in ("EAGLE", "EAGLE3", "DSPARK", "HYDRA", "STANDALONE")), (
        "others read no cache"
    )
    assert choices.call_count
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.runs == theirs.runs
        assert ours.usage == theirs.usage
    assert sum(answer.usage.accepted for answer in found) > 0
    assert found[0].usage.predicted == len(found[0].tokens)
    assert not launches.early
    assert launches.reads > 100
    assert ("_scan", "_finish") in launches.pairs
    # Drafters that score all levels at once: in chains the sampler comes right after the level's tokens are written.
    assert (("_grow_kernel", "_scan") in launches.pairs) == algorithm.startswith("MEDUSA")


def gemma3_with_eagle3(path: Path) -> tuple[Path, Path]:
    sizes = {"hidden": 64, "head_dim": 32, "heads": 2, "kv_heads": 1}
    target = make_gemma3(path / "target", **sizes, sliding_window=80, branch_scale=0.04)
    return target, make_eagle3(path / "draft", target)


def gemma4_with_assistant(path: Path) -> tuple[Path, Path]:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64}
    target = make_gemma4(path / "target", **{**SMALL, **sizes}, sliding_window=80, branch_scale=0.04)
    return target, make_assistant(path / "draft", target, agree=True, clusters=(16, 5), **sizes)


def gpt_oss_with_eagle3(path: Path) -> tuple[Path, Path]:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    target = make_gpt_oss(path / "target", **sizes, sliding_window=80, num_hidden_layers=3)
    return target, make_eagle3(path / "draft", target)


def deepseek_with_nextn(path: Path) -> tuple[Path, Path]:
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
    target = make_glm(path / "target", family="DeepseekV3", **{**MLA, **GROUPS, **sizes}, agree=True)
    return target, target


def qwen3_5_with_nextn(path: Path) -> tuple[Path, Path]:
    target = make_qwen3_5(path / "target", hidden=64, head_dim=32, state_size=16, branch_scale=0.04)
    return target, target


@pytest.mark.parametrize(
    ("made", "longest"),
    [
        (gemma3_with_eagle3, 82),
        (gemma4_with_assistant, 82),
        (gpt_oss_with_eagle3, 30),
        (deepseek_with_nextn, 30),
        (qwen3_5_with_nextn, 40),
    ],
)
def test_other_layers_than_llama_s(
    made: Callable[[Path], tuple[Path, Path]], longest: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Prompts before and after the end of a window, in chunks; norms with wide weights, GELU, experts, sinks, latents
    and states."""
    target, draft = made(tmp_path)
    settings = {
        "dtype": "float32",
        "chunked_prefill_size": 2 * longest // 3,
        **drafting("NEXTN" if draft == target else "EAGLE3", draft, (3, 2, 6)),
    }
    prompts = [[(7 * i * i + 3 * i) % 64 for i in range(length)] for length in (10, longest)]
    params = [msgspec.structs.replace(each, max_tokens=3) for each in PARAMS[:2]]
    work = list(zip(prompts, params, strict=True))
    expected = answer_all(make_scheduler(target, **settings), work)
    request.getfixturevalue("on_triton")
    with followed() as launches:
        found = answer_all(make_scheduler(target, **settings), work)
    assert not launches.early
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert all(each.usage.drafted for each in found)
