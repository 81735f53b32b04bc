"""Mixtures of experts: the same text however it is computed, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from specserve_kernels import Routes, gather_slots

from benchmarks.lossless import make_items
from specserve.config import make_settings
from specserve.engine.graphs import Graphs
from specserve.engine.profile import eager_seconds, measure_eager, measure_graphs, replay_seconds
from specserve.engine.shapes import candidate_shapes
from specserve.layers.experts import Router
from specserve.models.read_config import load_model_config
from specserve.process.assemble import resolve_engine
from specserve.speculation.context import Context
from specserve.speculation.control.cost import CostModel
from tests.engines import context_of, make_scheduler
from tests.matrix import check_drafted
from tests.reference.draft_models import make_eagle3
from tests.reference.gpt_oss import make_gpt_oss
from tests.reference.models import make_llama, make_qwen3_moe
from tests.test_graphs import fake_graphs
from tests.test_more_targets import GLM, SIZES

Measure = Callable[[], CostModel]


@pytest.mark.parametrize(
    ("make", "part"),
    [(partial(make_qwen3_moe, branch_scale=0.1), slice(6)), (make_gpt_oss, slice(6, None))],
    ids=["qwen3", "gpt-oss"],
)
def test_every_text_is_identical(make: Callable[[Path], Path], part: slice, tmp_path: Path) -> None:
    """In batches, chunks and trees, whose tokens go through other experts. Each kind with all choices, and each pair of
    choices with one of them."""
    target = make(tmp_path / "target")
    items = make_items(
        [[(7 * i * i + n) % 64 for i in range(length)] for n, length in enumerate((3, 17, 40))], 6, 12
    )
    check_drafted(target, items, part)


def test_flashinfer_has_no_sinks(tmp_path: Path) -> None:
    path, more = (
        str(make_gpt_oss(tmp_path, head_dim=32, sliding_window=80)),
        {"device": "cuda", "attention_backend": "flashinfer"},
    )
    with pytest.raises(
        ValueError, match="flashinfer: attention sinks are not passed to FlashInfer; use triton"
    ):
        resolve_engine(make_settings(model_path=path, skip_tokenizer_init=True, **more), has_gpu=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be 1 to the number of experts 6, found 7"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer, found 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, found 0"),
        ({"num_experts": "six"}, "num_experts must be a positive integer, found 'six'"),
        ({"mlp_only_layers": 0.5}, "mlp_only_layers must be a list of layers 0 to 2, found 0.5"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers must be a list of layers 0 to 2, found .3."),
        (
            {"shared_expert_intermediate_size": -1},
            "shared_expert_intermediate_size must be an integer of at least 0, found -1",
        ),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, found 1"),
        ({"max_window_layers": None}, "max_window_layers must be an integer of at least 0, found None"),
        ({"hidden_act": ["silu"]}, "hidden_act must be silu or gelu_pytorch_tanh, found .'silu'."),
    ],
)
def test_numbers_that_do_not_fit_are_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_qwen3_moe(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        make_scheduler(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 4}, "n_group 4 and topk_group 1 do not fit num_experts_per_tok 2 of 6 experts"),
        ({"n_group": 6}, "n_group 6 and topk_group 1 do not fit num_experts_per_tok 2 of 6 experts"),
        ({"topk_group": 2}, "n_group 1 and topk_group 2 do not fit"),
        ({"n_shared_experts": -1}, "n_shared_experts must be an integer of at least 0, found -1"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be a positive number, found 0"),
    ],
)
def test_groups_of_experts_that_do_not_fit_are_named(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {**GLM, **SIZES, "architectures": ["Glm4MoeForCausalLM"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path)


def eagerly(context: Context) -> Measure:
    return partial(measure_eager, context, 8, candidate_shapes, partial(eager_seconds, context))


def with_graphs(context: Context) -> Measure:
    with fake_graphs():
        graphs = Graphs.capture(context, candidate_shapes(8)).steps
        run = partial(replay_seconds, context)
        return partial(measure_graphs, context, graphs, lambda shape: run(shape, graphs[shape]))


@pytest.mark.parametrize("measure", [eagerly, with_graphs])
def test_steps_are_measured_with_drawn_tokens(measure: Callable[[Context], Measure], tmp_path: Path) -> None:
    """Whose experts differ. Those of a target without experts are measured on the padding row."""
    target = make_qwen3_moe(tmp_path / "target", experts=16)
    dense = make_llama(tmp_path / "dense")
    found, forward, event = list[Routes](), Router.forward, Mock(elapsed_time=Mock(return_value=1.0))

    def route(router: Router, x_TH: torch.Tensor, *gate: torch.Tensor | None) -> Routes:
        found.append(routes := forward(router, x_TH, *gate))
        return routes

    for path, algorithm in ((target, "EAGLE3"), (target, "NGRAM"), (dense, "EAGLE3")):
        draft = make_eagle3(path / "eagle3", path) if algorithm == "EAGLE3" else None
        given = {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft and str(draft)}
        context = context_of(make_scheduler(path, **given, max_running_requests=8))
        slots, dummy, run = context.state.slots, context.state.dummy, measure(context)
        with (
            patch.object(torch.cuda, "Event", Mock(return_value=event)),
            patch.object(Router, "forward", route),
            patch("specserve.speculation.context.gather_slots", wraps=gather_slots) as gathered,
        ):
            assert run().table
        rows = {row for call in gathered.call_args_list for row in call.args[0].tolist()}
        assert rows == {dummy} if path == dense else {0, 1, 2, 3} <= rows <= {*range(8)}
        assert not slots.limit.any()
        assert not slots.draft_cap.any()
        assert slots.length.tolist() == [0] * dummy + [1]
    wide = [routes.expert_TK for routes in found if len(routes.expert_TK) >= 8]
    assert min(len(expert_TK.unique()) for expert_TK in wide) > 3
