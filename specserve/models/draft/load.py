"""Reads published draft heads: EAGLE (1/2) and EAGLE-3. Shapes in the files decide, the config fills in.

Everything that does not fit the target is a ValueError that names the file, the tensor or field, and what is expected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.layers.decoder import LayerConfig
from specserve.models.checkpoint import TensorFiles, building, load_parameters
from specserve.models.config import ModelConfig, layer_config, read_json, rope_config
from specserve.models.draft.base import DraftConfig
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.llama import LlamaModel

_OUTSIDE_LAYER = ("fc.", "norm.", "lm_head.")
_UNREAD = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """``ids`` are the target ids of the draft vocabulary, None where it is the target's; ``notes`` say what was
    resolved."""

    head: EagleHead | Eagle3Head
    ids: Tensor | None
    notes: list[str]


def load_draft(
    path: Path, algorithm: str, target: LlamaModel, layer: int, max_positions: int, dtype: torch.dtype
) -> LoadedDraft:
    """Loads the head at ``path`` as ``algorithm`` (EAGLE or EAGLE3), to run as pool layer ``layer``."""
    files, config = TensorFiles(path), read_json(path / "config.json")
    kind = _kind(files)
    if kind != algorithm:
        raise ValueError(
            f"{path} holds an {kind} head; --speculative-algorithm is {algorithm}, expected {kind}"
        )
    return _LOADERS[kind](path, files, config, target, layer, max_positions, dtype)


def _kind(files: TensorFiles) -> str:
    q_shape, fc_shape = (files[name].shape for name in ("layers.0.self_attn.q_proj.weight", "fc.weight"))
    return "EAGLE3" if q_shape[1] == 2 * fc_shape[0] else "EAGLE"


def _load_eagle(
    path: Path,
    files: TensorFiles,
    config: Mapping[str, Any],
    target: LlamaModel,
    layer: int,
    max_positions: int,
    dtype: torch.dtype,
) -> LoadedDraft:
    draft = _draft_config(path, files, config, target.config, input_factor=1)
    if draft.layer.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{path}: hidden_size {draft.layer.hidden_size} does not fit the target's {target.config.hidden_size}"
        )
    device = target.lm_head.weight.device
    with building(dtype, device):
        head = EagleHead(draft, layer, max_positions, target.embed_tokens, target.lm_head)
    load_parameters(head, files, _file_name)
    return LoadedDraft(head, None, [_rope_note(draft)])


def _load_eagle3(
    path: Path,
    files: TensorFiles,
    config: Mapping[str, Any],
    target: LlamaModel,
    layer: int,
    max_positions: int,
    dtype: torch.dtype,
) -> LoadedDraft:
    for name in _UNREAD:
        if config.get(name):
            raise ValueError(f"{path}: config field {name} = {config[name]!r} is not supported")
    taps, note = _taps(path, config, target.config.num_layers)
    draft = _draft_config(path, files, config, target.config, input_factor=2)
    draft = dataclasses.replace(draft, taps=taps)
    if draft.layer.hidden_size != target.config.hidden_size:
        raise ValueError(
            f"{path}: hidden_size {draft.layer.hidden_size} does not fit the target's {target.config.hidden_size}, "
            "whose embedding it reads"
        )
    ids = _draft_ids(path, files, draft)
    device = target.lm_head.weight.device
    with building(dtype, device):
        head = Eagle3Head(draft, layer, max_positions, target.embed_tokens)
    load_parameters(head, files, _file_name)
    return LoadedDraft(head, None if ids is None else ids.to(device), [note, _rope_note(draft)])


_LOADERS = {"EAGLE": _load_eagle, "EAGLE3": _load_eagle3}


def _file_name(name: str) -> str:
    return name if name.startswith(_OUTSIDE_LAYER) else f"layers.0.{name}"


def _draft_config(
    path: Path, files: TensorFiles, config: Mapping[str, Any], target: ModelConfig, input_factor: int
) -> DraftConfig:
    vocab = config.get("vocab_size")
    if vocab != target.vocab_size:
        raise ValueError(f"{path}: vocab_size {vocab!r} does not fit the target's {target.vocab_size}")
    layer = _layer(path, files, config, input_factor)
    rows = files["lm_head.weight"].shape[0] if "lm_head.weight" in files else vocab
    declared = config.get("draft_vocab_size")
    if declared is not None and declared != rows:
        raise ValueError(
            f"{path}: draft_vocab_size {declared} does not fit lm_head.weight, which has {rows} rows"
        )
    return DraftConfig(
        layer=layer,
        rope=rope_config(config, path / "config.json"),
        target_hidden_size=config.get("target_hidden_size") or target.hidden_size,
        target_vocab_size=vocab,
        draft_vocab_size=rows,
        fc_bias="fc.bias" in files,
    )


def _layer(path: Path, files: TensorFiles, config: Mapping[str, Any], input_factor: int) -> LayerConfig:
    """The layer's geometry; head size and key heads follow from the projections, biases from their presence."""
    layer = layer_config(config, path / "config.json")
    q_rows, k_rows = (files[f"layers.0.self_attn.{name}_proj.weight"].shape[0] for name in ("q", "k"))
    head_dim = q_rows // layer.num_heads
    if head_dim * layer.num_heads != q_rows or k_rows % head_dim:
        raise ValueError(
            f"{path}: q_proj has {q_rows} rows and k_proj {k_rows}, which do not fit num_attention_heads "
            f"{layer.num_heads}"
        )
    return dataclasses.replace(
        layer,
        input_size=input_factor * layer.hidden_size,
        head_dim=head_dim,
        num_kv_heads=k_rows // head_dim,
        qkv_bias="layers.0.self_attn.q_proj.bias" in files,
    )


def _taps(path: Path, config: Mapping[str, Any], layers: int) -> tuple[tuple[int, ...], str]:
    """Boundaries of the target's residual stream. Published lists come in two conventions that differ by one: lists
    that start with 1 name layers whose *output* is meant."""
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError(f"{path}: eagle_config.use_aux_hidden_state false is not supported")
    given = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    if not given:
        taps, how = (2, layers // 2, layers - 3), "no list in the config: the default"
    elif given[0] == 1:
        taps, how = tuple(i + 1 for i in given), f"the list {given} starts with 1: outputs of layers"
    else:
        taps, how = tuple(given), f"the list {given} read as inputs of layers"
    if any(not 0 <= tap <= layers for tap in taps) or list(taps) != sorted(set(taps)):
        raise ValueError(
            f"{path}: eagle_aux_hidden_state_layer_ids resolve to {list(taps)}; expected increasing boundaries "
            f"from 0 to {layers}, the target's number of layers"
        )
    return taps, f"draft reads the target's residual stream before layers {list(taps)} ({how})"


def _rope_note(draft: DraftConfig) -> str:
    return f"draft rotary base {draft.rope.theta:g}, scaling {draft.rope.kind}"


def _draft_ids(path: Path, files: TensorFiles, draft: DraftConfig) -> Tensor | None:
    """Target ids of the draft vocabulary from the offsets ``d2t``; checked against ``t2d`` where the file has it."""
    rows = draft.draft_vocab_size
    if "d2t" not in files:
        if rows != draft.target_vocab_size:
            raise ValueError(f"{path}: tensor d2t is missing; a draft vocabulary of {rows} tokens needs it")
        return None
    offsets = files["d2t"]
    if offsets.shape != (rows,) or offsets.dtype.is_floating_point:
        raise ValueError(
            f"{files.file('d2t')}: tensor d2t is {offsets.dtype} {list(offsets.shape)}, expected int64 [{rows}]"
        )
    ids = offsets.long() + torch.arange(rows)
    if bool((ids.diff() <= 0).any()) or int(ids.min()) < 0 or int(ids.max()) >= draft.target_vocab_size:
        raise ValueError(
            f"{files.file('d2t')}: tensor d2t must give strictly increasing target ids from 0 to "
            f"{draft.target_vocab_size - 1}"
        )
    if "t2d" in files:
        kept = torch.zeros(draft.target_vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if not torch.equal(files["t2d"].bool(), kept):
            raise ValueError(f"{files.file('t2d')}: tensor t2d does not mark the target ids that d2t gives")
    return ids
