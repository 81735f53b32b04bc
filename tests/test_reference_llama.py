from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import llama
from tests.reference.doubles import float32_means_float64
from tests.reference.models import LLAMA3_ROPE, load_checkpoint, make_llama

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7, 50]


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one kv head": {"kv_heads": 1},
    "ungrouped": {"kv_heads": 4},
    "tied": {"tied": True},
    "theta": {"rope_theta": 500000.0},
    "llama3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 50000.0, "hidden": 64},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "wide heads": {"head_dim": 16},
    "bias": {"bias": True},
    "odd sizes": {"vocab": 61, "hidden": 24, "inner": 36, "heads": 6, "kv_heads": 3, "layers": 2},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_against_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    path = make_llama(tmp_path, **options)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad(), float32_means_float64():
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
        theirs = model(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False)
    ours = llama.forward(*load_checkpoint(path), TOKENS)
    layers = model.config.num_hidden_layers
    assert theirs.logits.dtype == torch.float64
    assert len(ours.streams) == layers + 1
    torch.testing.assert_close(ours.logits, theirs.logits[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.hidden, theirs.hidden_states[layers][0], rtol=0, atol=1e-10)
    for boundary in range(layers):  # transformers norms the last one
        torch.testing.assert_close(
            ours.streams[boundary], theirs.hidden_states[boundary][0], rtol=0, atol=1e-10
        )


def test_last_stream_is_the_hidden_state_before_its_norm(tmp_path: Path) -> None:
    state, config = load_checkpoint(make_llama(tmp_path))
    out = llama.forward(state, config, TOKENS)
    normed = llama.rms_norm(out.streams[-1], state["model.norm.weight"], config["rms_norm_eps"])
    torch.testing.assert_close(normed, out.hidden)


def test_old_and_new_config_spellings_agree(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rope_scaling": LLAMA3_ROPE, "rope_theta": 50000.0}
    new_state, new_config = load_checkpoint(make_llama(tmp_path / "new", **options))
    old_state, old_config = load_checkpoint(make_llama(tmp_path / "old", old_config=True, **options))
    assert "rope_parameters" not in old_config
    assert old_config["rope_theta"] == 50000.0
    assert torch.equal(
        llama.forward(new_state, new_config, TOKENS).logits,
        llama.forward(old_state, old_config, TOKENS).logits,
    )


def test_llama3_scaling_has_all_three_regions() -> None:
    config = {"rope_theta": 50000.0, "rope_scaling": LLAMA3_ROPE}
    plain = llama.inverse_frequencies({"rope_theta": 50000.0}, 16)
    scaled = llama.inverse_frequencies(config, 16)
    ratios = [a / b for a, b in zip(plain, scaled, strict=True)]
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(8)
    assert any(1.001 < ratio < 7.999 for ratio in ratios)


def test_published_llama31_frequencies() -> None:
    """Llama 3.1 8B: base 500000, factor 8, 8192 original positions; ends and blend by the formula of 11.2."""
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
    scaled = llama.inverse_frequencies({"rope_theta": 500000.0, "rope_scaling": rope}, 128)
    plain = [500000.0 ** (-2 * j / 128) for j in range(64)]
    assert scaled[28] == plain[28]  # wavelength 1956 < 8192 / 4
    assert scaled[36:] == [frequency / 8 for frequency in plain[36:]]  # wavelength 10104 > 8192
    assert all(plain[j] / 8 < scaled[j] < plain[j] for j in range(29, 35))


def test_no_token_sees_the_future(tmp_path: Path) -> None:
    state, config = load_checkpoint(make_llama(tmp_path))
    whole = llama.forward(state, config, TOKENS).logits
    torch.testing.assert_close(llama.forward(state, config, TOKENS[:7]).logits, whole[:7], rtol=0, atol=1e-12)


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="yarn"):
        llama.inverse_frequencies({"rope_scaling": {"type": "yarn"}}, 16)
