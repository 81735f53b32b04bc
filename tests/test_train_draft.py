"""Training of drafts end to end on tiny models: losses, resuming, export."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from specserve.layers.norms import RMSNorm
from specserve.models.checkpoint import load_parameters
from specserve.models.tensor_files import TensorFiles
from specserve.tools.train import export
from specserve.tools.train.block import BlockTrainer, block_trainer
from specserve.tools.train.cli import parse_args
from specserve.tools.train.eagle import (
    Eagle3Trainer,
    EagleTrainer,
    eagle3_files,
    eagle_files,
    make_eagle,
    make_eagle3,
)
from specserve.tools.train.heads import HeadOptions
from specserve.tools.train.loop import LoopConfig, TrainingLoop
from specserve.tools.train.optim import build_optimizers, rate
from specserve.tools.train.packing import RowSampler
from specserve.tools.train.report import CHAIN, Chains, doubts, measure, table
from specserve.tools.train.target import run_target
from specserve.tools.train.trainer import Level, Levels, Windows
from tests.train_models import opened_batch, outlying_target, tiny_batch, tiny_rows, tiny_target

TAPS = (0, 2, 4)
IDS = torch.arange(0, 40, 2)
KINDS = ["eagle", "eagle3"]


def make_trainer(kind: str) -> EagleTrainer | Eagle3Trainer:
    target = tiny_target()
    torch.manual_seed(0)
    if kind == "eagle":
        return EagleTrainer(target, make_eagle(target, HeadOptions(), 64), 3, 0.8)
    draft = make_eagle3(target, HeadOptions(taps=TAPS), 64, IDS)
    return Eagle3Trainer(target, draft, IDS, 7, 0.8)


def make_loop(trainer: EagleTrainer | Eagle3Trainer, output: Path, optimizer: str = "adamw") -> TrainingLoop:
    sampler = RowSampler([tiny_rows()], None, 2, 0, torch.device("cpu"), False)
    config = LoopConfig(output=output, steps=6, warmup=2, log_every=1, settings={"seed": 0})
    return TrainingLoop(
        config, trainer, build_optimizers(trainer, optimizer, 1e-2, 0.01), trainer.loss, sampler
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind: str, optimizer: str) -> None:
    trainer, batch = make_trainer(kind), tiny_batch()
    optimizers = build_optimizers(trainer, optimizer, 2e-2, 0.0)
    losses, matches = [], []
    for _ in range(25):
        loss, metrics = trainer.loss(batch)
        loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
        losses.append(float(loss.detach()))
        matches.append(float(metrics["match_1"]))
    assert losses[-1] < 0.85 * losses[0]
    assert matches[-1] > matches[0] + 0.1


@pytest.mark.parametrize("kind", [*KINDS, "block"])
def test_a_fresh_draft_is_as_unsure_as_chance(kind: str) -> None:
    target, batch = outlying_target(), opened_batch()
    torch.manual_seed(0)
    trainer: EagleTrainer | Eagle3Trainer | BlockTrainer
    if kind == "eagle":
        trainer = EagleTrainer(target, make_eagle(target, HeadOptions(), 64), 3, 0.8, 0.0, 1.0)
    elif kind == "eagle3":
        draft = make_eagle3(target, HeadOptions(taps=TAPS), 64, IDS)
        trainer = Eagle3Trainer(target, draft, IDS, 7, 0.8)
    else:
        given = "--algorithm DFLASH --model-path m --data d --output o --aux-layers 1 3 --draft-layers 2 --anchors 8"
        args = parse_args(
            [*given.split(), *["--block-size", "4", "--mask-token", "39", "--max-length", "60"]]
        )
        trainer = block_trainer(args, target, [], size=16, markov=False)
    _, metrics = trainer.loss(batch)
    chance = math.log(len(IDS) if kind == "eagle3" else 40)
    losses = [float(metrics[f"loss_{i + 1}"]) for i in range(3)]
    assert max(losses) < chance + 2.5, "drafts that are sure of random tokens begin at 13 to 36"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    whole, parts = make_trainer(kind), make_trainer(kind)
    torch.manual_seed(5)
    make_loop(whole, tmp_path / "whole", "muon").run()
    torch.manual_seed(5)
    first = make_loop(parts, tmp_path / "parts", "muon")
    for _ in range(3):
        first.train_step()
    first.save()
    torch.manual_seed(99)
    again = make_trainer(kind)
    second = make_loop(again, tmp_path / "parts", "muon")
    second.run()
    assert second.step == 6
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)


def test_warm_up_takes_at_most_a_tenth_of_a_run() -> None:
    rates = [rate("linear", step, None, step / 50) for step in range(50)]
    assert rates[:6] == pytest.approx([0.01, 0.2 * 0.98, 0.4 * 0.96, 0.6 * 0.94, 0.8 * 0.92, 0.9])
    long = [rate("linear", step, None, step / 10000) for step in (0, 49, 99, 5000)]
    assert long == pytest.approx([0.01, 0.5 * 0.9951, 0.9901, 0.5])
    assert rate("linear", 25, 100, 0.5) == pytest.approx(0.26 * 0.5), "as it was given"


def test_the_clock_starts_after_the_first_step(tmp_path: Path) -> None:
    """Else compilation would take the time and end the warm-up of a short run."""
    trainer = make_trainer("eagle")
    optimizers = build_optimizers(trainer, "adamw", 1e-2, 0.0)

    now = 50.0

    def loss(batch: Any) -> Any:
        nonlocal now
        now += 0.05 if loop.step else 1.0
        return trainer.loss(batch)

    config = LoopConfig(output=tmp_path, time_limit=0.8, log_every=1)
    loop = TrainingLoop(config, trainer, optimizers, loss, lambda k: tiny_batch())
    with patch("specserve.tools.train.loop.time.monotonic", lambda: now):
        loop.run()
    lines = [json.loads(line) for line in loop.log_path.read_text().splitlines()]
    assert [line["elapsed"] for line in lines[:1]] == [0]
    assert len(lines) > 5
    assert max(line["lr"] for line in lines) > 0.8 * 1e-2
    assert lines[-1]["lr"] < 0.5 * 1e-2


def test_doubts_about_a_draft() -> None:
    guessed = Chains([100, 40], [40, 20], Counter({3: 20, 5: 80}))
    assert guessed.chance == 0.8
    assert not doubts([9.0, 5.0, 4.0], 50, None, Chains([100], [40], Counter(range(5))))
    for losses, warmup, found, words in (
        (
            [9.0, 5.0],
            None,
            guessed,
            r"no use: it guesses 0\.400 .* is right for 0\.800; train longer \(now 50 steps\)",
        ),
        (
            [9.0, 8.9],
            None,
            Chains([100], [90], Counter()),
            r"not fallen: 9\.000 at step 1, 8\.900 in the end",
        ),
        ([9.0, 5.0], 60, Chains([100], [90], Counter()), "warm-up never ended: 50 of --warmup 60 steps"),
        ([9.0, 5.0], None, Chains([0], [0], Counter()), "acceptance was not measured"),
    ):
        (told,) = doubts(losses, 50, warmup, found)
        assert re.search(words, told)


def test_sizes_are_those_of_most_tokens_and_go_into_the_file() -> None:
    target, batch = outlying_target(), opened_batch()
    draft = make_eagle3(target, HeadOptions(taps=TAPS), 64, IDS)
    trainer = Eagle3Trainer(target, draft, IDS, 7, 0.8)
    trainer.sizes.measure(target, batch, TAPS)
    _, tapped = run_target(target, batch, TAPS)
    for x_TH in trainer.sizes(tapped):
        size_H = x_TH[batch.mask_T].abs().median(0).values
        assert float(size_H.max()) < 1
        assert float(size_H.median()) > 0.5
    before = draft.fuse(tapped[0], trainer.sizes(tapped))
    trainer.sizes.fold(draft.get_submodule("fc"))
    torch.testing.assert_close(draft.fuse(tapped[0], tapped), before, rtol=1e-3, atol=1e-3)
    assert trainer.sizes(tapped)[0].equal(tapped[0])


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("eagle")
    make_loop(trainer, tmp_path).save()
    config = LoopConfig(output=tmp_path, steps=6, settings={"seed": 1})
    loop = TrainingLoop(
        config, trainer, build_optimizers(trainer, "adamw", 1e-2, 0.0), trainer.loss, lambda k: tiny_batch()
    )
    with pytest.raises(ValueError, match=r"seed \(was 0, now 1\)"):
        loop.run()


def test_eagle_export_has_the_published_layout(tmp_path: Path) -> None:
    trainer = make_trainer("eagle")
    assert isinstance(trainer, EagleTrainer)
    target = tiny_target()
    files = eagle_files(trainer, Namespace(export_dtype="float16"))
    export.write(files, tmp_path, torch.float16, "bin")
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    layer = "layers.0."
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "embed_tokens.weight": (40, 16),
        "fc.weight": (16, 32),
        layer + "self_attn.q_proj.weight": (16, 16),
        layer + "self_attn.k_proj.weight": (8, 16),
        layer + "self_attn.v_proj.weight": (8, 16),
        layer + "self_attn.o_proj.weight": (16, 16),
        layer + "mlp.gate_proj.weight": (24, 16),
        layer + "mlp.up_proj.weight": (24, 16),
        layer + "mlp.down_proj.weight": (16, 24),
        layer + "post_attention_layernorm.weight": (16,),
    }
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    again = make_eagle(target, HeadOptions(), 64)
    load_parameters(again, TensorFiles(tmp_path), lambda n: n if n.startswith("fc.") else layer + n)
    for name, parameter in trainer.draft.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter.half().float(), rtol=0, atol=0)


def test_eagle3_export_has_the_published_layout(tmp_path: Path) -> None:
    trainer = make_trainer("eagle3")
    assert isinstance(trainer, Eagle3Trainer)
    target = tiny_target()
    files = eagle3_files(trainer, Namespace(export_dtype="bfloat16"))
    export.write(files, tmp_path, torch.bfloat16, "safetensors")
    found = load_file(tmp_path / "model.safetensors")
    layer = "midlayer."
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "fc.weight": (16, 48),
        layer + "input_layernorm.weight": (16,),
        layer + "hidden_norm.weight": (16,),
        layer + "self_attn.q_proj.weight": (16, 32),
        layer + "self_attn.k_proj.weight": (8, 32),
        layer + "self_attn.v_proj.weight": (8, 32),
        layer + "self_attn.o_proj.weight": (16, 16),
        layer + "post_attention_layernorm.weight": (16,),
        layer + "mlp.gate_proj.weight": (24, 16),
        layer + "mlp.up_proj.weight": (24, 16),
        layer + "mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,),
        "lm_head.weight": (20, 16),
        "d2t": (20,),
        "t2d": (40,),
    }
    assert found["d2t"].dtype == torch.int64
    assert found["t2d"].dtype == torch.bool
    assert (found["d2t"] + torch.arange(20)).tolist() == IDS.tolist()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(TAPS), "SGLang"
    assert saved["eagle_aux_hidden_state_layer_ids"] == list(TAPS), "vLLM"
    assert saved["rope_theta"] == 10000.0
    assert saved["draft_vocab_size"] == 20
    again = make_eagle3(target, HeadOptions(taps=TAPS), 64, IDS)
    outer = ("fc.", "norm.", "lm_head.")
    load_parameters(again, TensorFiles(tmp_path), lambda n: n if n.startswith(outer) else "layers.0." + n)
    for name, parameter in trainer.draft.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter.bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_report_counts_chains(kind: str) -> None:
    trainer = make_trainer(kind).eval()
    with patch.object(RMSNorm, "forward", autospec=True, side_effect=RMSNorm.forward) as norms:
        found = measure(trainer.unroll, tiny_rows(), 2, torch.device("cpu"), False)
    assert all(call.args[1].dim() == 2 for call in norms.call_args_list), "a GPU's kernel takes matrices"
    assert len(found.reached) == CHAIN
    assert all(k <= r for k, r in zip(found.kept, found.reached, strict=True))
    assert "tokens/step" in table({"all": found})


def test_a_chain_goes_on_where_draft_target_and_text_agree() -> None:
    batch = tiny_batch()
    windows = Windows(batch)
    levels = []
    for i in range(3):
        text = windows.predicted(i)
        guess = text.clone()
        guess[:, i::2] += 1  # wrong on some columns, the target follows the text
        levels.append(Level(torch.tensor(0.0), guess, text, windows.valid(i)))
    reached, kept = Levels(windows, levels).accepted()
    valid = [windows.valid(i) for i in range(3)]
    right = [level.guess_BC == level.greedy_BC for level in levels]
    one = valid[0] & right[0]
    two = one[:, :-1] & valid[1] & right[1]
    assert [int(x) for x in reached[:2]] == [int(valid[0].sum()), int((one[:, :-1] & valid[1]).sum())]
    assert [int(x) for x in kept[:2]] == [int(one.sum()), int(two.sum())]
    assert Chains([10, 5], [5, 4]).tokens_per_step == pytest.approx(1 + 0.5 + 0.5 * 0.8)
