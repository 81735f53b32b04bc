"""Load published heads of one decoder layer: EAGLE (1 and 2), EAGLE-3, P-EAGLE, and MTP of MiMo and of
DeepSeek's kind.

Anything that does not fit the target raises a ValueError that names the file, the tensor or field, and what is
expected.
"""

from __future__ import annotations

from collections.abc import Callable

from specserve.methods import DraftSettings, names_like
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig
from specserve.models.draft.block_source import check_window
from specserve.models.draft.eagle import EagleHead
from specserve.models.draft.eagle3 import Eagle3Head
from specserve.models.draft.load import LoadedDraft, load_draft, shared_out
from specserve.models.draft.mtp import MTPHead, NextNHead
from specserve.models.draft.p_eagle import PEagleHead
from specserve.models.draft.reader import (
    Eagle3Reading,
    EagleReading,
    MTPReading,
    NextNReading,
    PEagleReading,
    Reading,
)
from specserve.models.draft.source import HeadSource, open_source

Head = EagleHead | Eagle3Head | MTPHead
_KINDS: dict[str, tuple[type[Reading], Callable[..., Head]]] = {
    "EAGLE": (EagleReading, EagleHead),
    "EAGLE3": (Eagle3Reading, Eagle3Head),
    "P_EAGLE": (PEagleReading, PEagleHead),
    "MTP": (MTPReading, MTPHead),
    "NEXTN": (NextNReading, NextNHead),
}


def load_head(
    draft: DraftSettings, target: TargetModel, prepare: Callable[[Reading, Head], None] | None = None
) -> LoadedDraft[Head]:
    """Load the head of a draft. ``prepare`` is called with it before it is quantized."""
    reading = open_draft(draft, target.config)
    config, (reads, make_head) = reading.config(), _KINDS[reading.kind]
    parallel = reads is PEagleReading
    if parallel:
        check_window(reading.source.config, reading.source.config_file, target.max_positions)
    own = isinstance(reading, Eagle3Reading) and (config.tied or "lm_head.weight" in reading.source)
    config = shared_out(config, config.layer_class, draft, target, reading.source)

    def make(_: HeadSource, target: TargetModel) -> Head:
        first = target.config.kv_layers  # where layers are counted from in the pool
        layer = 0 if parallel else first if config.layer.index is None else target.config.num_layers
        lm_head = None if own else target.lm_head
        return make_head(config, layer, target.max_positions, target.embed_tokens, lm_head)

    def loaded(head: Head) -> None:
        if isinstance(head, MTPHead):
            head.read_embedding_first()
        if prepare is not None:
            prepare(reading, head)
        if draft.quantization != "none" and head.reader is target.lm_head:
            head.copy_head(target.lm_head)

    return load_draft(draft, target, reading.source, make, reading.ids, loaded)


def open_draft(draft: DraftSettings, target: ModelConfig) -> Reading:
    """Open the directory of a head. Raises ValueError if it is unreadable or holds another kind of head."""
    source = open_source(draft)
    kind = source.mtp_kind or _eagle_kind(source)
    if kind not in draft.method.heads:
        fitting = " or ".join(names_like(draft.name, lambda method: kind in method.heads))
        article = "a" if kind in ("P_EAGLE", "NEXTN") else "an"
        raise ValueError(
            f"{draft.path} holds {article} {kind} head; --speculative-algorithm is {draft.name}, expected {fitting}"
        )
    return _KINDS[kind][0](source, target)


def _eagle_kind(source: HeadSource) -> str:
    """Return EAGLE or EAGLE3; EAGLE-3's attention reads twice the hidden size."""
    q_proj, fc = "self_attn.q_proj.weight", "fc.weight"
    columns = source.matrix(q_proj)[1]
    hidden = source.matrix(fc)[0] if fc in source else source.matrix("mlp.gate_proj.weight")[1]
    if columns not in (hidden, 2 * hidden):
        raise ValueError(
            f"{source.file(q_proj)}: tensor {source.stored(q_proj)} has {columns} columns, expected {hidden} (EAGLE) "
            f"or {2 * hidden} (EAGLE-3)"
        )
    if source.is_p_eagle:
        return "P_EAGLE"
    return "EAGLE3" if columns == 2 * hidden else "EAGLE"
