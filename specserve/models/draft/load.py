"""Reads published draft heads: EAGLE (1/2), EAGLE-3 and MiMo's MTP. Shapes in the files decide, the config fills in.

Everything that does not fit the target is a ValueError that names the file, the tensor or field, and what is expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.methods import method_of, names_where
from specserve.models.checkpoint import building, file_tensors, load_parameters
from specserve.models.draft.base import DraftConfig
from specserve.models.draft.choices import (
    read_draft_ids,
    read_draft_size,
    read_fusion_norms,
    read_output_norm,
    read_recycled,
    read_residual_normed,
    read_taps,
    read_target_width,
    reads_fused,
    scores_with_embedding,
)
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.draft.geometry import (
    check_hidden_size,
    check_vocabulary,
    read_layer,
    read_rope,
    wants_own_embedding,
)
from specserve.models.draft.mtp import MTPHead
from specserve.models.draft.override import check_kind
from specserve.models.draft.source import Source, open_source
from specserve.models.llama import LlamaModel

Head = EagleHead | Eagle3Head | MTPHead

_NOT_EAGLE = ("skip_prenorm", "skip_output_norm")  # of a conversion for vLLM; true or absent in EAGLE heads


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """``ids``, on the CPU, are the target ids of the draft vocabulary, None where it is the target's; ``notes`` say
    what was resolved."""

    head: Head
    ids: Tensor | None
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the head will run: next to which target, as which layer of the pool, up to which position."""

    target: LlamaModel
    layer: int
    max_positions: int


def load_draft(
    path: Path,
    algorithm: str,
    target: LlamaModel,
    layer: int,
    max_positions: int,
    dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
) -> LoadedDraft:
    """Loads the head at ``path`` for ``algorithm``, to run as pool layer ``layer``; ``overrides`` go before fields of
    its config."""
    source = open_source(path, overrides or {})
    head, ids = build_draft(source, algorithm, Place(target, layer, max_positions), dtype)
    load_parameters(head, source.files, source.stored)
    source.note_unread(file_tensors(head))
    if isinstance(head, MTPHead):
        head.read_embedding_first()
    return LoadedDraft(head, ids, source.notes)


def build_draft(
    source: Source, algorithm: str, place: Place, dtype: torch.dtype
) -> tuple[Head, Tensor | None]:
    """A head whose weights are not loaded yet, on its target's device, and what its tokens are called there."""
    kind = head_kind(source, algorithm)
    check_kind(source.overrides, kind)
    with building(dtype, place.target.device):
        return _BUILDERS[kind](source, place)


def head_kind(source: Source, algorithm: str) -> str:
    """Which head the tensors are. Raises ValueError when ``algorithm`` does not run it."""
    kind = "MTP" if source.is_mtp else _eagle_kind(source)
    method = method_of(algorithm)
    if method is None or kind not in method.heads:
        fitting = " or ".join(names_where(lambda method: kind in method.heads))
        raise ValueError(
            f"{source.path} holds an {kind} head; --speculative-algorithm is {algorithm}, expected {fitting}"
        )
    return kind


def _eagle_kind(source: Source) -> str:
    """EAGLE-3's attention reads twice the hidden size."""
    q_proj, fc = "self_attn.q_proj.weight", "fc.weight"
    columns = source.matrix(q_proj)[1]
    hidden = source.matrix(fc)[0] if fc in source else source.matrix("mlp.gate_proj.weight")[1]
    if columns not in (hidden, 2 * hidden):
        stored = source.stored(q_proj)
        raise ValueError(
            f"{source.files.file(stored)}: tensor {stored} has {columns} columns, expected {hidden} (EAGLE) or "
            f"{2 * hidden} (EAGLE-3)"
        )
    return "EAGLE3" if columns == 2 * hidden else "EAGLE"


def _eagle(source: Source, place: Place) -> tuple[Head, Tensor | None]:
    target = place.target.config
    for name in _NOT_EAGLE:
        if source.config.get(name) is False:
            raise ValueError(f"{source.config_file}: {name} false is not supported")
    vocab, layer = check_vocabulary(source, target), read_layer(source, input_factor=1)
    check_hidden_size(source, layer, target)
    norms = _eagle_norms(source)
    recycled = read_recycled(source, "pre", "norm" in norms)
    if norms:
        source.note(f"norms: {', '.join(norms)}; its state is recycled {recycled}-norm")
    config = DraftConfig(
        layer=layer,
        rope=read_rope(source),
        target_hidden_size=target.hidden_size,
        target_vocab_size=vocab,
        draft_vocab_size=vocab,
        fc_bias="fc.bias" in source,
        own_embedding=wants_own_embedding(source, layer, target),
        recycle_normed=recycled == "post",
        embedding_norm="embedding_layernorm" in norms,
        feature_norm="hidden_states_layernorm" in norms,
        input_norm="input_layernorm" in norms,
        final_norm="norm" in norms,
    )
    return _shared(EagleHead, config, place), None


def _eagle_norms(source: Source) -> list[str]:
    """Norms in addition to EAGLE's one. Only speculators' layout has those of the layer's input and of the head;
    elsewhere such tensors are leftovers of a conversion."""
    wanted = []
    if source.flag("add_para_norm"):
        wanted += ["embedding_layernorm", "hidden_states_layernorm"]
    if source.from_speculators:
        optional = ("embedding_layernorm", "hidden_states_layernorm", "input_layernorm", "norm")
        needed = ("embedding_layernorm", "input_layernorm", "norm") if source.flag("layernorms") else ()
        wanted += [name for name in optional if name in needed or f"{name}.weight" in source]
    return list(dict.fromkeys(wanted))


def _eagle3(source: Source, place: Place) -> tuple[Head, Tensor | None]:
    target = place.target.config
    taps = read_taps(source, target)
    vocab, layer = check_vocabulary(source, target), read_layer(source, input_factor=2)
    width = read_target_width(source, target)
    own_embedding = wants_own_embedding(source, layer, target)
    rows = read_draft_size(source, vocab)
    ids = read_draft_ids(source, rows, vocab)
    tied = scores_with_embedding(source, layer.hidden_size, target)
    fuse = reads_fused(source, taps, width, layer.hidden_size)
    joint, each = read_fusion_norms(source)
    normed, recycled = read_output_norm(source)
    config = DraftConfig(
        layer=layer,
        rope=read_rope(source),
        target_hidden_size=width,
        target_vocab_size=vocab,
        draft_vocab_size=rows,
        taps=taps,
        fc_bias="fc.bias" in source,
        own_embedding=own_embedding,
        recycle_normed=recycled,
        fuse=fuse,
        joint_norm=joint,
        tap_norms=each,
        residual_normed=read_residual_normed(source),
        tied=tied,
        final_norm=normed,
    )
    lm_head = None if config.tied or "lm_head.weight" in source else place.target.lm_head
    return Eagle3Head(config, place.layer, place.max_positions, place.target.embed_tokens, lm_head), ids


def _mtp(source: Source, place: Place) -> tuple[Head, Tensor | None]:
    target = place.target.config
    vocab, layer = check_vocabulary(source, target), read_layer(source, input_factor=1)
    check_hidden_size(source, layer, target)
    tuned = "num_speculative_steps" in source.config or "mtp_loss_step_weights" in source.config
    side = source.side("mtp_hidden", "post" if tuned else "pre")
    recycled = read_recycled(source, side, normed=True)
    why = "its config is FastMTP's" if tuned else "the default for MiMo"
    why = source.origin("mtp_hidden") if "mtp_hidden" in source.overrides else why
    source.note(f"reads the target's state {side}-norm ({why}) and recycles its own {recycled}-norm")
    config = DraftConfig(
        layer=layer,
        rope=read_rope(source),
        target_hidden_size=target.hidden_size,
        target_vocab_size=vocab,
        draft_vocab_size=vocab,
        taps=(target.num_layers,) if side == "pre" else (),
        recycle_normed=recycled == "post",
    )
    return _shared(MTPHead, config, place), None


def _shared(cls: type[EagleHead] | type[MTPHead], config: DraftConfig, place: Place) -> Head:
    """A head that scores with the target's rows."""
    target = place.target
    return cls(config, place.layer, place.max_positions, target.embed_tokens, target.lm_head)


_BUILDERS = {"EAGLE": _eagle, "EAGLE3": _eagle3, "MTP": _mtp}
