"""A published draft with its tensors under this package's names, and one flat configuration.

Dialects differ in names (``midlayer.``, ``model.layers.0.``, ``transformer.``, ``mtp_layers.0.``, ``mtp.layers.0.``,
that after a target's last layer) and in where the configuration nests. What a head computes is decided elsewhere, by
tensors first and fields second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from specserve.layers.rotary import rope_fields
from specserve.methods import OWN_HEADS, DraftSettings, own_heads
from specserve.models.config import LIST, OBJECT, Values, check, check_rope_fields, read_json
from specserve.models.draft.fields import FIELDS, FLAG, parse_overrides
from specserve.models.draft.load import DraftSource
from specserve.models.draft.random_head import random_head
from specserve.models.tensor_files import TensorFiles

_OUTSIDE_LAYER = (
    "fc.",
    "norm.",
    "lm_head.",
    "embed_tokens.",
    "input_norm.",
    "fc_norm.",
    "embedding_layernorm.",
    "hidden_states_layernorm.",
    "layers.",
    "mask_hidden",
)
_OLD_SPECULATORS = {"fc.": "fusion_fc.", "norm.": "pre_lm_head_layernorm."}
# Of speculators; an old conversion for vLLM; a vision-language file.
_NESTED = ("transformer_layer_config", "model", "text_config")
# Known heads that are not supported, by a pattern of a tensor's name.
_FOREIGN = {
    r"layers\.0\.self_attn\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\.": "multi-head latent attention (MLA)",
    r"layers\.0\.mlp\.experts\.": "a mixture of experts",
}
# Parts of a target's checkpoint: MiMo's, Qwen's, DeepSeek's.
_HEADS = re.compile(r"mtp_layers\.\d+\.|(mtp\.)layers\.\d+\.|layers\.\d+\.(?=eh_proj\.)")
# Names after the prefix of such a head, by what they begin with in this package.
_MTP = {"norm.": "final_layernorm."}
_QWEN = {
    "norm.": "norm.",
    "token_layernorm.": "pre_fc_norm_embedding.",
    "hidden_layernorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "": "layers.0.",
}
_NEXTN = {
    "norm.": "shared_head.norm.",
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "mlp.shared_expert.": "mlp.shared_experts.",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's, in the second kind
_OWN = Values(
    "0 or 1, as the file has one layer for multi-token prediction",
    lambda value: type(value) is int and value in (0, 1),
)


@dataclass(frozen=True, slots=True)
class HeadSource(DraftSource):
    """``config`` is flat and includes the overrides."""

    config: dict[str, Any]
    overrides: Mapping[str, Any]
    unread = ("d2t", "t2d", "embed_tokens.weight")  # read separately; the embedding has its own note

    @property
    def path(self) -> Path:
        return self.files.path

    @property
    def mtp_kind(self) -> str | None:
        """The kind of head that is part of a target's checkpoint, None for a draft's own."""
        return None if not self.prefix else "MTP" if self.prefix.startswith("mtp_layers.") else "NEXTN"

    @property
    def is_p_eagle(self) -> bool:
        return "mask_hidden" in self.files

    @property
    def from_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def layer_count(self) -> int:
        """Its layers, from the first to the last that the file has."""
        found = (re.match(r"layers\.(\d+)\.", name) for name in self.files.names())
        return 1 + max((int(match[1]) for match in found if match), default=0)

    def stored(self, name: str) -> str:
        if kind := self.mtp_kind:
            renamed = _MTP if kind == "MTP" else _QWEN if self.prefix == "mtp." else _NEXTN
            begin = next((begin for begin in renamed if name.startswith(begin)), "")
            return self.prefix + renamed.get(begin, "") + name.removeprefix(begin)
        outside = next((prefix for prefix in _OUTSIDE_LAYER if name.startswith(prefix)), None)
        if "fusion_fc.weight" not in self.files:
            return name if outside else f"layers.0.{name}"
        if outside is None:
            return f"transformer.{name}"
        return _OLD_SPECULATORS.get(outside, outside) + name.removeprefix(outside)

    def note_unread(self, parameters: Iterable[str], ends: tuple[str, ...]) -> None:
        DraftSource.note_unread(self, [*parameters, *(_COPIES if self.prefix else ())], ends)

    def __contains__(self, name: str) -> bool:
        return self.stored(name) in self.files

    def file(self, name: str) -> Path:
        """Return the file with a head's parameter. Raises ValueError if there is none."""
        return self.files.file(self.stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.header(self.stored(name)).shape

    def matrix(self, name: str) -> tuple[int, int]:
        """Return rows and columns. Raises ValueError naming file and tensor if it is not a matrix."""
        shape = self.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"{self.file(name)}: tensor {self.stored(name)} has shape {list(shape)}, expected a matrix"
            )
        return shape[0], shape[1]

    def get(self, name: str) -> Any:
        """Return a field of ``FIELDS`` from the config, nested under ``eagle_config`` or at the top level; None if
        absent or empty."""
        if name in self.overrides:
            return self.overrides[name]
        found = (self.config.get("eagle_config") or {}).get(name)
        found = self.config.get(name) if found is None else found
        if found is None or found == []:
            return None
        check({name: found}, self.config_file, FIELDS[name].values, name)
        return found

    def says(self, name: str) -> str:
        """Return the source of a field's value, for notes."""
        return FLAG if name in self.overrides else f"its config's {name}"


def open_source(draft: DraftSettings) -> HeadSource:
    """Read a draft's directory. Raises ValueError if it is unreadable or names an unsupported kind of head."""
    path, overrides = draft.path, parse_overrides(draft.config_override)
    tensors = None if draft.random else TensorFiles(path)
    config = read_json(path / "config.json")
    inner: dict[str, Any] = next((config[n] for n in _NESTED if isinstance(config.get(n), dict)), {})
    flat = {**config, **inner}
    check(flat, path / "config.json", OBJECT, "eagle_config", *_NESTED[:1], optional=True)
    check(flat, path / "config.json", LIST, "architectures", optional=True)
    check_rope_fields(flat, path / "config.json")
    files = random_head(path, flat, draft.method.heads) if tensors is None else tensors
    heads = {found[0]: found[1] or found[0] for name in files.names() if (found := _HEADS.match(name))}
    if len(heads) > 1:
        raise ValueError(
            f"{path} holds {min(heads)[:-1]} to {max(heads)[:-1]}: a target with one of them is expected"
        )
    if heads:
        field, own = own_heads(flat)
        check({field: own}, path / "config.json", _OWN, field, optional=True)
    source = HeadSource(files, _overridden(flat, overrides), overrides, prefix="".join(heads.values()))
    _refuse_foreign(source)
    return source


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Apply overrides. An override of either spelling of the rotary fields replaces both."""
    rope = {name: overrides[name] for name in ("rope_theta", "rope_scaling") if name in overrides}
    if rope and (written := rope_fields(config)):
        config["rope_theta"] = written.pop("rope_theta", config.get("rope_theta"))
        config["rope_scaling"], config["rope_parameters"] = written, None
    return {**config, **overrides}


def _refuse_foreign(source: HeadSource) -> None:
    if source.mtp_kind:
        return
    count, names = source.layer_count, source.files.names()
    if not any(".self_attn." in name for name in names):
        raise ValueError(
            f"{source.path} holds no head of EAGLE's kind: expected {source.stored('self_attn.q_proj.weight')}, "
            f"found {source.files.contents}"
        )
    if count > 1 and not {*chain(*OWN_HEADS.values())}.isdisjoint(source.config.get("architectures") or ()):
        field, own = own_heads(source.config)
        says = f", though its config says {field} {own}" if own else ""
        raise ValueError(
            f"{source.path} has no layer for multi-token prediction{says}: quantized files often lack it; "
            "--speculative-draft-model-path takes a directory of files that have it"
        )
    for pattern, what in _FOREIGN.items():
        if any(re.match(pattern, name) for name in names):
            raise ValueError(f"{source.path}: {what} in a draft: not supported")
    if count > 1 and not source.is_p_eagle:
        raise ValueError(
            f"{source.path} holds layers.0 to layers.{count - 1}: a draft of one layer, one with mask_hidden "
            "(P-EAGLE), or a target with a layer for multi-token prediction, is expected"
        )
    declared = source.config.get("num_hidden_layers")
    if declared not in (None, count):
        has = "one layer" if count == 1 else f"{count} layers"
        source.note(f"has {has}: its tensors say so, num_hidden_layers is {declared!r}")
