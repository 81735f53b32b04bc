"""Tiny targets, drafts and batches for the training tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from specserve.layers.config import LayerConfig
from specserve.layers.rotary import RopeConfig
from specserve.models.config import ModelConfig
from specserve.models.llama import LlamaModel
from specserve.tools.train.packing import Batch, Documents, Rows, make_batch, pack

VOCAB = 40


def tiny_config(tied: bool = False, vocab: int = VOCAB) -> ModelConfig:
    layer = LayerConfig(
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        input_size=16,
    )
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        layers=(layer,) * 4,
        ropes=(RopeConfig(),),
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        eos_token_ids=(1,),
        bos_token_id=0,
        dtype="float32",
    )


def tiny_target(dtype: torch.dtype = torch.float32, tied: bool = False) -> LlamaModel:
    """A frozen random target whose distributions are far from flat."""
    torch.manual_seed(7)
    model = LlamaModel(tiny_config(tied), 64).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    return model.requires_grad_(False)


def outlying_target() -> LlamaModel:
    """A target as many real ones are: a head much like the embedding, states that are a thousand times larger at the
    documents' first token, 0, and a channel that is a hundred times larger than others."""
    model = tiny_target()
    with torch.no_grad():
        model.lm_head.rows(None)[0].copy_(model.embed_tokens.weight)
        model.embed_tokens.weight[0].mul_(1000)
        model.layers[0].get_parameter("mlp.down_proj.weight")[5].mul_(100)
    return model


def opened_batch(row_length: int = 16) -> Batch:
    """Documents that begin with token 0, which occurs nowhere else."""
    documents = tiny_documents()
    tokens = np.maximum(documents.tokens, 1)
    tokens[documents.starts[:-1]] = 0
    rows = pack(replace(documents, tokens=tokens), row_length, seed=0)
    return make_batch([(rows, np.arange(len(rows)))], torch.device("cpu"), flash=False)


def tiny_documents(lengths: tuple[int, ...] = (9, 14, 5, 20, 7), vocab: int = VOCAB) -> Documents:
    rng = np.random.default_rng(3)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = rng.integers(0, vocab, starts[-1]).astype(np.int32)
    return Documents(tokens, rng.random(starts[-1]) < 0.8, starts)


def tiny_rows(row_length: int = 16) -> Rows:
    return pack(tiny_documents(), row_length, seed=0)


def tiny_batch(row_length: int = 16) -> Batch:
    rows = tiny_rows(row_length)
    return make_batch([(rows, np.arange(len(rows)))], torch.device("cpu"), flash=False)
