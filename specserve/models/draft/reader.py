"""Read a published head: its tensors decide, and the fields of its configuration fill in the rest.

Each kind of head is a class. It fills each field of ``DraftConfig`` from one of its ``parts`` or a property, which
notes what was found and why, or raises ValueError naming the file, the tensor or field, and what is expected.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.rotary import RopeConfig, rope_fields
from specserve.models.config import ModelConfig, layer_config, rope_config
from specserve.models.draft.fields import FLAG, LIST, check_fields
from specserve.models.draft.head import DraftConfig
from specserve.models.draft.load import read_ids
from specserve.models.draft.source import HeadSource
from specserve.models.registry import model_class


class Part(NamedTuple):
    """A part that a head has if one of ``fields`` says so or its file has one of ``tensors``. ``speculators``:
    additional fields in files of speculators; in other files such tensors are leftovers of a conversion and don't
    count."""

    tensors: tuple[str, ...]
    fields: tuple[str, ...] = ()
    speculators: tuple[str, ...] | None = None
    note: str = ""


_LAYER = {
    "qkv_bias": Part(tuple(f"self_attn.{name}_proj.bias" for name in "qkv")),
    "o_bias": Part(("self_attn.o_proj.bias",)),
    "mlp_bias": Part(tuple(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down"))),
    "qk_norm": Part(tuple(f"self_attn.{name}_norm.weight" for name in "qk")),
}
_ADDED = 8  # tokens after a target's, from which on a draft's vocabulary is another
_FUSED = "norms the target's states before fc"


class Reading:
    """A head for ``target``, read from ``source``. ``ids``: the target ids of the draft vocabulary, on the CPU; None:
    it is the target's."""

    kind: ClassVar[str]
    input_factor: ClassVar[int] = 1  # input width of attention, in hidden sizes
    parts: ClassVar[dict[str, Part]] = {}
    ids: Tensor | None = None

    def __init__(self, source: HeadSource, target: ModelConfig) -> None:
        self.source, self.target = source, target

    def read(self) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of ``DraftConfig`` that can be read, and the problems with the others."""
        found, problems = dict[str, Any](), list[str]()
        for name in ("overrides", *(field.name for field in dataclasses.fields(DraftConfig)), "ids"):
            try:
                if name in self.parts:
                    found[name] = self.has(self.parts[name])
                elif hasattr(type(self), name):
                    found[name] = getattr(self, name)
            except ValueError as error:
                problems.append(str(error))
        return found, list(dict.fromkeys(problems))  # dependent fields fail with the same error

    def config(self) -> DraftConfig:
        """Return the configuration. Raises ValueError with the first problem."""
        found, problems = self.read()
        if problems:
            raise ValueError(problems[0])
        return DraftConfig(**{name: found[name] for name in found.keys() - {"overrides", "ids"}})

    def has(self, part: Part) -> bool:
        source, fields, tensors = self.source, part.fields, part.tensors
        if part.speculators is not None:
            fields += part.speculators if source.from_speculators else ()
            tensors = tensors if source.from_speculators else ()
        has = any(source.get(name) for name in fields) or any(name in source for name in tensors)
        if has and part.note:
            source.note(part.note)
        return has

    @property
    def overrides(self) -> None:
        check_fields(self.source.overrides, self.kind)

    def _fit(self, name: str, found: Any, expected: int, why: str = "") -> int:
        if found != expected:
            raise ValueError(
                f"{self.source.config_file}: {name} {found!r} does not fit the target's {expected}{why}"
            )
        return expected

    @property
    def target_vocab_size(self) -> int:
        why = "; it was made for another tokenizer, with other tokens"
        return self._fit("vocab_size", self.source.config.get("vocab_size"), self.target.vocab_size, why)

    @property
    def draft_vocab_size(self) -> int:
        return self.target_vocab_size

    @property
    def target_hidden_size(self) -> int:
        return self._fit("hidden_size", self.layer.hidden_size, self.target.hidden_size)

    @cached_property
    def layer(self) -> LayerConfig:
        """The layer's geometry. Head size and number of KV heads follow from the projections."""
        source = self.source
        fields = {**source.config, "num_key_value_heads": None, "head_dim": None}
        layer = layer_config(fields, source.config_file)
        q_rows, k_rows = (source.matrix(f"self_attn.{name}_proj.weight")[0] for name in "qk")
        heads, size = layer.num_heads, q_rows // layer.num_heads
        if size * heads != q_rows or k_rows % size or heads % max(1, k_rows // size):
            raise ValueError(
                f"{source.file('self_attn.q_proj.weight')}: q_proj has {q_rows} rows and k_proj {k_rows}, which do not "
                f"fit num_attention_heads {heads}"
            )
        for name, found in (("head_dim", size), ("num_key_value_heads", k_rows // size)):
            if (declared := source.config.get(name)) not in (None, found):
                source.note(
                    f"{name} {found}: its projections have that many rows, its config says {declared}"
                )
        parts: dict[str, Any] = {name: self.has(part) for name, part in _LAYER.items()}
        width = self.input_factor * layer.hidden_size
        return dataclasses.replace(
            layer, input_size=width, head_dim=size, num_kv_heads=k_rows // size, **parts
        )

    @cached_property
    def rope(self) -> RopeConfig:
        rope = rope_config(self.source.config, self.source.config_file)
        self.source.note(self.rope_words(rope))
        return rope

    def rope_words(self, rope: RopeConfig) -> str:
        """Describe the rotary embedding. Its base is 10000 if the config names none, never the target's, with which
        published drafts were not trained."""
        source = self.source
        named = rope_fields(source.config).get("rope_theta") or source.config.get("rope_theta")
        why = source.says("rope_theta") if named else "its config has no rope_theta"
        scaled = f" ({source.says('rope_scaling')})" if "rope_scaling" in source.overrides else ""
        return f"rotary base {rope.theta:g} ({why}), scaling {rope.kind}{scaled}"

    def _recycled(self, default: str, normed: bool) -> str:
        """Return whether the state passed to the next level is the one before (``pre``) or after (``post``) the norm
        before the output head."""
        side: str = self.source.get("recycled_hidden") or default
        if side == "post" and not normed:
            raise ValueError(
                f"{self.source.path}: recycled_hidden post needs a norm before the head, and there is none"
            )
        return side


class EagleReading(Reading):
    """EAGLE and EAGLE-2."""

    kind = "EAGLE"
    trains_embedding: ClassVar[bool] = False
    parts: ClassVar[dict[str, Part]] = {
        "fc_bias": Part(("fc.bias",)),
        "embedding_norm": Part(("embedding_layernorm.weight",), ("add_para_norm",), ("layernorms",)),
        "feature_norm": Part(("hidden_states_layernorm.weight",), ("add_para_norm",), ()),
        "input_norm": Part(("input_layernorm.weight",), (), ("layernorms",)),
        "final_norm": Part(("norm.weight",), (), ("layernorms",)),
    }

    @property
    def target_hidden_size(self) -> int:
        for name in ("skip_prenorm", "skip_output_norm"):  # fields of a conversion for vLLM
            if self.source.config.get(name) is False:
                raise ValueError(f"{self.source.config_file}: {name} false is not supported")
        return super().target_hidden_size

    @property
    def own_embedding(self) -> bool:
        """Whether the file's embedding is used. The target's is preferred, because some exports contain a random
        one."""
        source, width = self.source, self.target.hidden_size
        own, wanted = "embed_tokens.weight" in source, source.get("use_own_embedding")
        if wanted and not own:
            source.shape("embed_tokens.weight")  # raises ValueError: there is none
        if self.layer.hidden_size != width and not own:
            why = ", whose embedding it reads: it has no tensor embed_tokens.weight of its own"
            self._fit("hidden_size", self.layer.hidden_size, width, why)
        if not own:
            taken, why = False, "its file has none"
        elif source.shape("embed_tokens.weight") != (self.target.vocab_size, width):
            taken, why = True, "its shape is not that of the target's"
        elif wanted is not None:
            taken, why = wanted, source.says("use_own_embedding")
        elif source.get("embed_requires_grad"):
            taken, why = True, f"{source.says('embed_requires_grad')}: it was trained"
        elif self.trains_embedding:
            taken, why = True, f"{self.kind} trains it"
        else:
            taken, why = False, "its file's has the same shape; use_own_embedding takes that"
        whose = "its own" if taken else "the target's"
        source.note(f"embedding: {whose} ({why})")
        return taken

    @property
    def recycle_normed(self) -> bool:
        recycled = self._recycled("pre", self.has(self.parts["final_norm"]))
        norms = [part.tensors[0].removesuffix(".weight") for part in self.parts.values() if self.has(part)]
        if norms := [name for name in norms if name != "fc.bias"]:
            self.source.note(f"norms: {', '.join(norms)}; its state is recycled {recycled}-norm")
        return recycled == "post"


class Eagle3Reading(EagleReading):
    """EAGLE-3: fuses states of the target, and has a draft vocabulary with its own output head."""

    kind = "EAGLE3"
    input_factor = 2
    parts: ClassVar[dict[str, Part]] = {
        "fc_bias": Part(("fc.bias",)),
        "joint_norm": Part(("input_norm.weight",), ("norm_before_fc",), note=f"{_FUSED} (norm_before_fc)"),
        "tap_norms": Part(("fc_norm.0.weight",), ("fc_norm",), note=f"{_FUSED} (fc_norm)"),
    }

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """Boundaries of the target's residual stream; none if the head reads the state after the final norm."""
        source, layers = self.source, self.target.num_layers
        if source.get("use_aux_hidden_state") is False:
            why = source.says("use_aux_hidden_state")
            source.note(f"reads the target's state after its final norm ({why} is false)")
            return ()
        taps, why = self._boundaries(source.get(LIST))
        if any(not 0 <= tap <= layers for tap in taps) or taps != sorted(set(taps)):
            raise ValueError(
                f"{source.config_file}: {LIST} resolve to {taps}; expected increasing boundaries from 0 to {layers}, "
                "the target's number of layers"
            )
        source.note(f"reads the target's residual stream before layers {taps} ({why})")
        return tuple(taps)

    def _boundaries(self, given: list[int] | None) -> tuple[list[int], str]:
        """Return the boundaries and the reason. Published lists have two conventions that differ by one: inputs or
        outputs of layers."""
        layers = self.target.num_layers
        if given is None:
            return [2, layers // 2, layers - 3], "no list in its config: the default"
        if LIST in self.source.overrides:
            return given, self.source.says(LIST)
        if self.source.from_speculators:
            return given, f"the list {given} of a speculators file: inputs of layers"
        if given[0] == 1:
            return [i + 1 for i in given], f"the list {given} starts with 1: outputs of layers"
        return given, f"the list {given} read as inputs of layers"

    @property
    def target_hidden_size(self) -> int:
        declared = self.source.get("target_hidden_size") or self.target.hidden_size
        why = "; it was made for another target"
        return self._fit("target_hidden_size", declared, self.target.hidden_size, why)

    @property
    def target_vocab_size(self) -> int:
        """The tokens that its embedding has. A target's vocabulary may lack some that were added at the end."""
        declared, size = self.source.config.get("vocab_size"), self.target.vocab_size
        if type(declared) is not int or "d2t" not in self.source.files or not 0 < declared - size < _ADDED:
            return super().target_vocab_size
        self.source.note(f"vocab_size {declared}: the target's {size} tokens are its first")
        return declared

    @cached_property
    def draft_vocab_size(self) -> int:
        """Number of tokens that it can draft: the rows of its own head, or the target's vocabulary."""
        source, own = self.source, "lm_head.weight" in self.source
        rows = source.matrix("lm_head.weight")[0] if own else self.target.vocab_size
        declared = source.config.get("draft_vocab_size")
        if declared not in (None, rows):
            has = f"which has {rows} rows" if own else f"which is missing; expected {rows}"
            raise ValueError(
                f"{source.config_file}: draft_vocab_size {declared} does not fit lm_head.weight, {has}"
            )
        return rows

    @cached_property
    def ids(self) -> Tensor | None:  # type: ignore[override]  # a constant for other kinds
        return read_ids(self.source, self.draft_vocab_size, self.target.vocab_size)

    @property
    def tied(self) -> bool:
        """Whether the draft's embedding is its output head; otherwise the target's replaces a missing head."""
        source = self.source
        if "lm_head.weight" in source:
            return False
        tied = bool(source.get("tie_word_embeddings"))
        if "d2t" in source.files or not (tied or self.layer.hidden_size == self.target.hidden_size):
            source.shape("lm_head.weight")  # raises ValueError: no other head has these rows
        whose = "its embedding" if tied else "the target's"
        source.note(f"head: {whose} (its file has no lm_head.weight)")
        return tied

    @property
    def fuse(self) -> bool:
        """Whether ``fc`` comes before the layer. A single state as wide as the draft needs none."""
        if self.has(self.parts["joint_norm"]) and self.has(self.parts["tap_norms"]):
            why = "norm_before_fc and fc_norm exclude each other, expected one of them"
            raise ValueError(f"{self.source.path}: {why}")
        width = self.target_hidden_size
        if not self.taps and width == self.layer.hidden_size:
            return False
        count, columns = max(1, len(self.taps)), self.source.matrix("fc.weight")[1]
        if columns != count * width:
            raise ValueError(
                f"{self.source.file('fc.weight')}: tensor fc.weight has {columns} columns, expected {count * width}: "
                f"{count} states of the target, {width} wide each"
            )
        return True

    @property
    def residual_normed(self) -> bool:
        source, normed = self.source, bool(self.source.get("norm_before_residual"))
        why = source.says("norm_before_residual") if normed else "norm_before_residual is not set"
        source.note(f"residual stream begins {'after' if normed else 'before'} the feature's norm ({why})")
        return normed

    @property
    def final_norm(self) -> bool:
        """Whether there is a norm before the output head: ``norm_output`` false means none in SpecForge's files."""
        normed = self.source.get("norm_before_head")
        given = self.source.from_speculators or self.source.get("norm_output") is not False
        return given if normed is None else bool(normed)

    @property
    def recycle_normed(self) -> bool:
        """Whether the state after the norm is recycled: ``norm_output`` true means that in speculators' files."""
        source, normed, given = self.source, self.final_norm, self.source.get("norm_output")
        recycled = self._recycled("post" if source.from_speculators and given else "pre", normed)
        trainer = "speculators" if source.from_speculators else "SpecForge"
        why = "" if given is None else f" (norm_output {given} as {trainer} means it)"
        does = "norms" if normed else "does not norm"
        source.note(f"{does} before its head, recycles its state {recycled}-norm{why}")
        return recycled == "post"


class PEagleReading(Eagle3Reading):
    """P-EAGLE: EAGLE-3 with more layers and what rows of unknown tokens read."""

    kind = "P_EAGLE"
    trains_embedding = True
    recycle_normed = False  # no state is recycled

    @property
    def num_layers(self) -> int:
        count = self.source.layer_count
        self.source.note(f"has {count} layers, and drafts all levels in one pass")
        return count

    @property
    def mask_id(self) -> int:
        source, names = self.source, ("mask_token_id", "pard_token", "ptd_token_id")
        name = next((name for name in names if source.get(name) is not None), None)
        if name is None:
            raise ValueError(
                f"{source.config_file}: {', '.join(names)}: one must be the id of the mask token that it was trained "
                f"with; {FLAG} takes a mask_token_id"
            )
        token, size = source.get(name), self.target.vocab_size
        if token >= size:
            raise ValueError(f"{source.config_file}: {name} {token} is none of the target's {size} tokens")
        source.note(f"reads token {token} as its mask ({source.says(name)})")
        return int(token)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        shape, width = self.source.shape("mask_hidden"), max(1, len(self.taps)) * self.target_hidden_size
        if math.prod(shape) != width:
            raise ValueError(
                f"{self.source.file('mask_hidden')}: tensor mask_hidden has shape {list(shape)}, expected {width} "
                "numbers: those of the target's states"
            )
        return shape


class MTPReading(Reading):
    """MiMo's next-token-prediction layer, part of its target's checkpoint."""

    kind = "MTP"
    side: ClassVar[tuple[str, str]] = ("pre", "the default for MiMo")

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.target.num_layers,) if self._side[0] == "pre" else ()

    @property
    def recycle_normed(self) -> bool:
        side, why = self._side
        recycled = self._recycled(side, normed=True)
        read = f"reads the target's state {side}-norm ({why})"
        self.source.note(f"{read} and recycles its own {recycled}-norm")
        return recycled == "post"

    @property
    def _side(self) -> tuple[str, str]:
        """The side of the target's final norm that it reads, and why."""
        given, config = self.source.get("mtp_hidden"), self.source.config
        if given is not None:
            return given, self.source.says("mtp_hidden")
        if "num_speculative_steps" in config or "mtp_loss_step_weights" in config:
            return "post", "its config is FastMTP's"
        return self.side


class NextNReading(MTPReading):
    """A layer of DeepSeek-V3's kind after its target's last. It has the class and geometry of the last that stores keys
    and values."""

    kind = "NEXTN"
    side = "post", "the default for DeepSeek's kind"

    @cached_property
    def layer(self) -> LayerConfig:
        if self.source.config.get("mtp_use_dedicated_embeddings"):
            raise ValueError(
                f"{self.source.config_file}: mtp_use_dedicated_embeddings true is not supported; expected false"
            )
        return self.target.next_layer

    @cached_property
    def rope(self) -> RopeConfig:
        return self.target.ropes[self.layer.rope]

    @property
    def layer_class(self) -> type[DecoderLayer]:
        return model_class(self.target.architecture, self.source.config_file).layer_class
