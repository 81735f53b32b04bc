from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import llama
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import load_checkpoint, make_llama

LAYER = {
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), hidden=32, heads=4, kv_heads=2, vocab=64)


def shapes(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def test_target_keys_and_seed(target: Path, tmp_path: Path) -> None:
    state, config = load_checkpoint(target)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert state["model.layers.2.self_attn.k_proj.weight"].shape == (16, 32)
    assert "lm_head.weight" in state
    again, _ = load_checkpoint(make_llama(tmp_path / "again"))
    other, _ = load_checkpoint(make_llama(tmp_path / "other", seed=1))
    assert all(torch.equal(again[key], state[key]) for key in state)
    assert not torch.equal(other["lm_head.weight"], state["lm_head.weight"])


def test_tied_target_has_no_head(tmp_path: Path) -> None:
    state, config = load_checkpoint(make_llama(tmp_path, tied=True, dtype=torch.bfloat16))
    assert "lm_head.weight" not in state
    assert config["tie_word_embeddings"] is True
    assert state["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"branch_scale": 0.04}], ids=str)
def test_greedy_text_varies(options: dict[str, Any], tmp_path: Path) -> None:
    state, config = load_checkpoint(make_llama(tmp_path, **options))
    tokens = [1, 5, 9]
    for _ in range(24):
        logits = llama.forward(state, config, tokens).logits[-1]
        assert torch.isfinite(logits).all()
        assert 0.5 < logits.std() < 20
        tokens.append(int(logits.argmax()))
    assert len(set(tokens[3:])) >= 6


def test_eagle_layout(target: Path, tmp_path: Path) -> None:
    path = make_eagle(tmp_path, target)
    assert {file.name for file in path.iterdir()} == {"config.json", "pytorch_model.bin"}
    state, config = load_checkpoint(path)
    assert set(state) == {"embed_tokens.weight", "fc.weight"} | {f"layers.0.{key}" for key in LAYER}
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert shapes(state)["fc.weight"] == (32, 64)
    assert shapes(state)["layers.0.self_attn.k_proj.weight"] == (16, 32)
    target_state, _ = load_checkpoint(target)
    assert torch.equal(state["embed_tokens.weight"], target_state["model.embed_tokens.weight"].half())
    assert config["bias"] is False
    assert config["num_hidden_layers"] == 1
    assert "rope_theta" not in config


def test_eagle_biases(target: Path, tmp_path: Path) -> None:
    state, config = load_checkpoint(make_eagle(tmp_path / "fc", target, fc_bias=True, rope_theta=5e5))
    assert shapes(state)["fc.bias"] == (32,)
    assert "bias" not in config
    assert config["rope_theta"] == 5e5
    state, config = load_checkpoint(make_eagle(tmp_path / "qkv", target, qkv_bias=True))
    assert shapes(state)["layers.0.self_attn.v_proj.bias"] == (16,)
    assert config["qkv_bias"] is True


def test_eagle3_layout(target: Path, tmp_path: Path) -> None:
    path = make_eagle3(tmp_path, target, draft_vocab=24)
    assert {file.name for file in path.iterdir()} == {"config.json", "pytorch_model.bin"}
    state, config = load_checkpoint(path)
    layer = LAYER | {"input_layernorm.weight", "hidden_norm.weight"}
    outer = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(state) == outer | {f"midlayer.{key}" for key in layer}
    assert shapes(state)["fc.weight"] == (32, 96)
    assert shapes(state)["midlayer.self_attn.q_proj.weight"] == (32, 64)
    assert shapes(state)["lm_head.weight"] == (24, 32)
    assert (state["d2t"].dtype, state["t2d"].dtype, state["fc.weight"].dtype) == (
        torch.int64,
        torch.bool,
        torch.float16,
    )
    ids = torch.arange(24) + state["d2t"]
    assert (ids.diff() > 0).all()
    assert state["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert (config["vocab_size"], config["draft_vocab_size"]) == (64, 24)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]


def test_eagle3_variants(target: Path, tmp_path: Path) -> None:
    state, config = load_checkpoint(
        make_eagle3(tmp_path / "a", target, layer_prefix="model.layers.0.", safetensors=True, own_head=False)
    )
    assert (tmp_path / "a" / "model.safetensors").exists()
    assert "model.layers.0.hidden_norm.weight" in state
    assert not {"d2t", "t2d", "lm_head.weight"} & set(state)
    deep = make_llama(tmp_path / "deep", layers=7, hidden=16, heads=2, kv_heads=1)
    _, config = load_checkpoint(make_eagle3(tmp_path / "b", deep, norm_before_residual=True))
    assert "eagle_config" not in config
    assert config["norm_before_residual"] is True
