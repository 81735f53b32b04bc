"""DFLASH, DSPARK, MEDUSA and MLP_SPECULATOR: the written file drafts what was trained, and a server loads it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specserve.models.checkpoint import load_target
from specserve.tools.train.__main__ import make_trainer, train, write_draft
from specserve.tools.train.block import BlockTrainer, draw_anchors
from specserve.tools.train.cli import parse_args
from specserve.tools.train.packing import Documents
from tests.engines import Checkpoints, answer_all, answer_one, make_scheduler
from tests.front.fake_engine import VOCAB
from tests.front.fakes import byte_tokenizer
from tests.reference import block
from tests.reference.models import make_llama
from tests.speculation.methods import scheduler_of
from tests.speculation.oracle import SAMPLING
from tests.train_models import tiny_batch, tiny_documents

BLOCKS = ["--block-size", "4", "--draft-layers", "2", "--aux-layers", "1", "2"]
GREEDY = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=28)
SMALL = {"DFLASH": BLOCKS, "DSPARK": [*BLOCKS, "--markov-rank", "8"], "MEDUSA": [], "MLP_SPECULATOR": []}
KINDS = {
    "DFLASH": [],
    "DSPARK": ["--ce-weight", "0.5"],
    "DSPARK rnn": ["--markov-head", "rnn"],
    "DSPARK gated": ["--markov-head", "gated"],
}


def arguments(kind: str, target: Path, output: Path, *more: str) -> Any:
    algorithm = kind.partition(" ")[0]
    given = [
        "--algorithm",
        algorithm,
        "--model-path",
        target,
        "--output",
        output,
        "--data",
        output / "data.npz",
    ]
    return parse_args(
        [*map(str, given), "--device", "cpu", "--export-dtype", "float32", *SMALL[algorithm], *more]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_the_file_drafts(
    kind: str, random_models: Checkpoints, tmp_path: Path
) -> None:
    """Guesses of the levels, at anchors in packed documents, are those of the slow reading of the file."""
    args = arguments(
        kind, random_models.target, tmp_path, *KINDS[kind], "--anchors", "6", "--max-length", "24"
    )
    target = load_target(random_models.target, torch.float64, torch.device("cpu"), 24)
    target.requires_grad_(False)
    torch.set_default_dtype(torch.float64)
    try:
        trainer = make_trainer(args, target, {"data": tiny_documents(vocab=60)}).eval()
        for parameter in trainer.parameters():  # what begins as 0 would hide what it adds
            torch.nn.init.normal_(parameter, std=0.3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(trainer, BlockTrainer)
    trainer.sizes.size_KH.copy_(torch.rand_like(trainer.sizes.size_KH) + 0.5)
    batch = tiny_batch(24)
    levels = trainer.unroll(batch, 9).levels
    args.export_dtype = "float64"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(write_draft.__globals__["DTYPES"], "float64", torch.float64)
        write_draft(args, trainer)
    assert len(levels) == (3 if kind == "DFLASH" else 4)
    anchored = draw_anchors(batch, 6, len(levels), training=False)
    document_T = batch.packing.documents(len(batch.tokens_T))
    compared = 0
    for i, level in enumerate(levels):
        for x in torch.nonzero(level.valid_BC[:, 0]).flatten().tolist()[::3]:
            anchor = int(anchored.column_XL[x, 0])
            begin = int((document_T == document_T[anchor]).nonzero()[0])
            # Positions are the row's, and attention sees differences alone.
            text = batch.tokens_T[begin : anchor + 1 + i].tolist()
            if anchor == begin:
                continue  # a served text has a past
            drafted = text[anchor + 1 - begin :]
            wanted = block.next_logits(tmp_path, random_models.target, text[: anchor + 1 - begin], drafted)
            assert int(level.guess_BC[x, 0]) == int(wanted.argmax()), (i, x)
            compared += 1
    assert compared > 8


@pytest.fixture(scope="module")
def texts(agreeing: Checkpoints) -> list[list[int]]:
    """The target's own answers, their prompts before them."""
    prompts = [[i] for i in range(0, 60, 2)]
    answers = answer_all(make_scheduler(agreeing.target), [(prompt, GREEDY) for prompt in prompts])
    return [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("DFLASH", ["--anchors", "12"]),
        ("MEDUSA", ["--medusa-heads", "3"]),
        ("MEDUSA", ["--medusa-heads", "3", "--medusa-layers", "2", "--medusa-scores", "target"]),
        ("MLP_SPECULATOR", ["--mlp-levels", "3"]),
    ],
)
def test_from_texts_to_a_served_draft(
    algorithm: str, more: list[str], texts: list[list[int]], agreeing: Checkpoints, tmp_path: Path
) -> None:
    """With the options of the command line."""
    lengths = np.array([0, *map(len, texts)]).cumsum()
    tokens = np.concatenate(texts)
    np.savez(tmp_path / "data.npz", tokens=tokens, mask=np.ones_like(tokens), starts=lengths)
    limits = ["--steps", "60", "--max-length", "32", "--batch-tokens", "256", "--lr", "1e-2", "--warmup", "5"]
    train(arguments(algorithm, agreeing.target, tmp_path, *limits, *more, "--export-dtype", "bfloat16"))
    rates = json.loads((tmp_path / "acceptance.json").read_text())["all"]["rates"]
    assert sum(rate > 0 for rate in rates) == 3, "as many levels as it has"
    draft = scheduler_of(algorithm, agreeing.target, tmp_path, (3, 1, 4))
    usage = [answer_one(draft, text[:3], GREEDY).usage for text in texts[::10]]
    per_step = sum(each.accepted for each in usage) / sum(each.steps for each in usage)
    assert per_step > 0.6


def test_from_conversations_to_a_served_draft(tmp_path: Path) -> None:
    target, data = make_llama(tmp_path / "target", vocab=VOCAB, branch_scale=0.04), tmp_path / "data.jsonl"
    byte_tokenizer().save_pretrained(target)
    words = ["red", "green", "blue", "the sky", "a tree", "nothing", "some bread", "two"]
    turns = [
        [{"role": "user", "content": f"{a}?"}, {"role": "assistant", "content": f"{b} and {a}"}]
        for a, b in product(words, words)
    ]
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    limits = ["--steps", "40", "--max-length", "48", "--batch-tokens", "384", "--lr", "1e-2", "--warmup", "5"]
    args = arguments(
        "DSPARK", target, tmp_path / "draft", *limits, "--ce-weight", "0.5", "--markov-rank", "24"
    )
    args.data = [data]
    train(args)
    params = msgspec.structs.replace(SAMPLING["greedy"], max_tokens=40)
    prompt = list(b"red?")
    answer = answer_one(scheduler_of("DSPARK", target, tmp_path / "draft", (4, 1, 5)), prompt, params)
    assert answer.tokens == answer_one(make_scheduler(target), prompt, params).tokens
    assert answer.usage.drafted > 0
    rates = json.loads((tmp_path / "draft" / "acceptance.json").read_text())["all"]["rates"]
    assert rates[0] > 0.3, "of what the target says next in texts like these; its own are others"


def test_the_written_names(agreeing: Checkpoints, tmp_path: Path) -> None:
    """Medusa's are the authors', MLP speculators' IBM's, blocks z-lab's and SpecForge's."""
    documents = {"data": tiny_documents(vocab=60)}
    target = load_target(agreeing.target, torch.float32, torch.device("cpu"), 24)
    found = {}
    for algorithm, more in (("MEDUSA", ["--medusa-heads", "2"]), ("DSPARK", [])):
        args = arguments(algorithm, agreeing.target, tmp_path / algorithm, *more)
        write_draft(args, make_trainer(args, target, documents))
        (file,) = (tmp_path / algorithm).glob("*.safetensors")
        found[file.name] = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    assert found["medusa_lm_head.safetensors"] == {
        f"{i}.{name}": shape
        for i in range(2)
        for name, shape in {"0.linear.weight": (32, 32), "0.linear.bias": (32,), "1.weight": (64, 32)}.items()
    }
    scored = arguments("MEDUSA", agreeing.target, tmp_path / "no_scores", "--medusa-scores", "target")
    write_draft(scored, make_trainer(scored, target, documents))
    without = load_file(tmp_path / "no_scores" / "medusa_lm_head.safetensors")
    assert {name.split(".", 1)[1] for name in without} == {"0.linear.weight", "0.linear.bias"}
    mlp = arguments("MLP_SPECULATOR", agreeing.target, tmp_path / "mlp", "--mlp-inner", "24")
    write_draft(mlp, make_trainer(mlp, target, documents))
    stored = load_file(tmp_path / "mlp" / "model.safetensors")
    assert {name.removeprefix("speculator."): tuple(each.shape) for name, each in stored.items()} == {
        "emb.0.weight": (64, 24),
        "proj.0.weight": (24, 32),
        "proj.1.weight": (24, 24),
        "ln.0.weight": (24,),
        "ln.0.bias": (24,),
        "head.0.weight": (64, 24),
    }
    names = found["model.safetensors"]
    assert names["fc.weight"] == (32, 64)
    assert names["layers.1.self_attn.q_norm.weight"] == (8,)
    assert names["markov_head.markov_w1.weight"] == names["markov_head.markov_w2.weight"] == (64, 8)
    assert names["confidence_head.proj.weight"] == (1, 40)
    assert not {"embed_tokens.weight", "lm_head.weight"} & names.keys()
    config = json.loads((tmp_path / "DSPARK" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [0, 1]
    assert config["dflash_config"]["mask_token_id"] == 63, "the last that no text has"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--block-size", "1"], "--block-size must be at least 2"),
        (["--mask-token", "64"], "--mask-token from 0 to 63; found 4 and 64"),
        (["--aux-layers", "0", "2"], r"--aux-layers must be rising boundaries from 1 to 2, found \[0, 2\]"),
    ],
    ids=range(3),
)
def test_options_that_do_not_fit(more: list[str], words: str, agreeing: Checkpoints, tmp_path: Path) -> None:
    target = load_target(agreeing.target, torch.float32, torch.device("cpu"), 24)
    args = arguments("DFLASH", agreeing.target, tmp_path, *more)
    with pytest.raises(ValueError, match=words):
        make_trainer(args, target, {"data": tiny_documents(vocab=60)})
    every = Documents(np.arange(64), np.ones(64, bool), np.array([0, 64]))
    with pytest.raises(ValueError, match="--mask-token: the data contain all tokens of the vocabulary"):
        make_trainer(arguments("DFLASH", agreeing.target, tmp_path), target, {"data": every})


def test_an_option_of_another_algorithm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model-path", "m", "--data", "d.npz", "--output", "o"]
    assert parse_args(["--algorithm", "EAGLE", *given, "--ttt-length", "4"]).ttt_length == 4
    with pytest.raises(SystemExit):
        parse_args(["--algorithm", "DFLASH", *given, "--ttt-length", "4"])
    assert "--ttt-length is an option of EAGLE and EAGLE3; --algorithm is DFLASH" in capsys.readouterr().err
