"""What an EAGLE-3 head reads and drafts: states of the target, their fusion, the draft vocabulary, the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.models.config import ModelConfig
from specserve.models.draft.source import Source

LIST = "eagle_aux_hidden_state_layer_ids"


def read_taps(source: Source, target: ModelConfig) -> tuple[int, ...]:
    """Boundaries of the target's residual stream; none where the head reads the state after the final norm."""
    if not source.flag("use_aux_hidden_state", True):
        why = source.origin("use_aux_hidden_state")
        source.note(f"reads the target's state after its final norm ({why} is false)")
        return ()
    given, layers = source.get(LIST) or None, target.num_layers
    if given is not None and not (isinstance(given, list) and all(type(i) is int for i in given)):
        raise ValueError(f"{source.config_file}: {LIST} must be a list of integers, found {given!r}")
    taps, why = _boundaries(source, given, target)
    if any(not 0 <= tap <= layers for tap in taps) or list(taps) != sorted(set(taps)):
        raise ValueError(
            f"{source.config_file}: {LIST} resolve to {list(taps)}; expected increasing boundaries from 0 to "
            f"{layers}, the target's number of layers"
        )
    source.note(f"reads the target's residual stream before layers {list(taps)} ({why})")
    return taps


def _boundaries(source: Source, given: list[int] | None, target: ModelConfig) -> tuple[tuple[int, ...], str]:
    """Published lists come in two conventions that differ by one: inputs of layers, and outputs of layers."""
    layers = target.num_layers
    if given is None:
        return (2, layers // 2, layers - 3), "no list in its config: the default"
    if LIST in source.overrides:
        return tuple(given), source.origin(LIST)
    if source.from_speculators:
        return tuple(given), f"the list {given} of a speculators file: inputs of layers"
    if given[0] == 1:
        return tuple(i + 1 for i in given), f"the list {given} starts with 1: outputs of layers"
    return tuple(given), f"the list {given} read as inputs of layers"


def read_target_width(source: Source, target: ModelConfig) -> int:
    declared = source.config.get("target_hidden_size")
    if declared not in (None, target.hidden_size):
        raise ValueError(
            f"{source.config_file}: target_hidden_size {declared!r} does not fit the target's {target.hidden_size}"
        )
    return target.hidden_size


def reads_fused(source: Source, taps: tuple[int, ...], width: int, hidden: int) -> bool:
    """Whether ``fc`` stands before the layer; a single state that is as wide as the draft needs none."""
    count = len(taps)
    if not taps and width == hidden:
        return False
    columns = source.matrix("fc.weight")[1]
    if columns != max(1, count) * width:
        raise ValueError(
            f"{source.files.file(source.stored('fc.weight'))}: tensor fc.weight has {columns} columns, expected "
            f"{max(1, count) * width}: {max(1, count)} states of the target, {width} wide each"
        )
    return True


def read_fusion_norms(source: Source) -> tuple[bool, bool]:
    """Whether the states of the target are normed together (``norm_before_fc``), or each (``fc_norm``)."""
    joint = source.flag("norm_before_fc") or "input_norm.weight" in source
    each = source.flag("fc_norm") or "fc_norm.0.weight" in source
    if joint and each:
        raise ValueError(
            f"{source.path}: norm_before_fc and fc_norm exclude each other, expected one of them"
        )
    for found, name in ((joint, "norm_before_fc"), (each, "fc_norm")):
        if found:
            source.note(f"norms the target's states before fc ({name})")
    return joint, each


def read_residual_normed(source: Source) -> bool:
    normed = source.flag("norm_before_residual")
    why = source.origin("norm_before_residual") if normed else "norm_before_residual is not set"
    source.note(f"residual stream begins {'after' if normed else 'before'} the feature's norm ({why})")
    return normed


def read_output_norm(source: Source) -> tuple[bool, bool]:
    """Whether a norm stands before the scores, and whether the state after it is recycled.

    ``norm_output`` means the second in speculators' files, the first in SpecForge's.
    """
    given = None if source.get("norm_output") is None else source.flag("norm_output")
    normed = source.flag("norm_before_head", source.from_speculators or given is not False)
    recycled = read_recycled(source, "post" if source.from_speculators and given else "pre", normed)
    trainer = "speculators" if source.from_speculators else "SpecForge"
    why = "" if given is None else f" (norm_output {given} as {trainer} means it)"
    source.note(
        f"{'norms' if normed else 'does not norm'} before its head, recycles its state {recycled}-norm{why}"
    )
    return normed, recycled == "post"


def read_recycled(source: Source, default: str, normed: bool) -> str:
    """Whether a level's state goes to the next before (``pre``) or after (``post``) the norm before the scores."""
    side = source.side("recycled_hidden", default)
    if side == "post" and not normed:
        raise ValueError(
            f"{source.path}: recycled_hidden post needs a norm before the head, and there is none"
        )
    return side


def read_draft_size(source: Source, vocab: int) -> int:
    """Tokens it can draft: the rows of its own head, the target's vocabulary without one."""
    rows = source.matrix("lm_head.weight")[0] if "lm_head.weight" in source else vocab
    declared = source.config.get("draft_vocab_size")
    if declared not in (None, rows):
        has = f"which has {rows} rows" if "lm_head.weight" in source else f"which is missing; expected {rows}"
        raise ValueError(
            f"{source.config_file}: draft_vocab_size {declared} does not fit lm_head.weight, {has}"
        )
    return rows


def read_draft_ids(source: Source, rows: int, vocab: int) -> Tensor | None:
    """Target ids of the draft vocabulary from the offsets ``d2t``; checked against ``t2d`` where the file has it."""
    if "d2t" not in source.files:
        if rows != vocab:
            raise ValueError(
                f"{source.path}: tensor d2t is missing; a draft vocabulary of {rows} tokens needs it, int64 [{rows}]"
            )
        source.note(f"vocabulary: all {vocab} tokens of the target (no d2t)")
        return None
    offsets, file = source.files["d2t"], source.files.file("d2t")
    if offsets.shape != (rows,) or offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{file}: tensor d2t is {offsets.dtype} {list(offsets.shape)}, expected int64 [{rows}]"
        )
    ids = offsets.long() + torch.arange(rows, device=offsets.device)
    if bool((ids.diff() <= 0).any()) or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise ValueError(f"{file}: tensor d2t must give strictly increasing target ids from 0 to {vocab - 1}")
    if rows < vocab:  # else t2d has nothing to say, and EAGLE's own files leave it all false
        _check_marks(source, ids, vocab)
    source.note(f"vocabulary: {rows} tokens of the target's {vocab} (d2t)")
    return None if rows == vocab else ids


def scores_with_embedding(source: Source, hidden: int, target: ModelConfig) -> bool:
    """Whether the draft's embedding scores, too; without that a head that the file lacks is the target's."""
    if "lm_head.weight" in source:
        return False
    tied = source.flag("tie_word_embeddings")
    if "d2t" in source.files or not (tied or hidden == target.hidden_size):
        source.shape("lm_head.weight")  # says that it is missing: nobody else has such rows
    whose = "its embedding" if tied else "the target's"
    source.note(f"head: {whose} (its file has no lm_head.weight)")
    return tied


def _check_marks(source: Source, ids: Tensor, vocab: int) -> None:
    if "t2d" not in source.files:
        return
    kept = torch.zeros(vocab, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    if not torch.equal(source.files["t2d"].bool(), kept):
        raise ValueError(
            f"{source.files.file('t2d')}: tensor t2d does not mark the target ids that d2t gives"
        )
