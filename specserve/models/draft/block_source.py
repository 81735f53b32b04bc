"""Reads and loads published block drafts: DFlash, DFlash2, DSpark and Domino.

The files of z-lab, DeepSpec, SpecForge and speculators differ in where fields are, in whether a slot scores the token
at it or the token after it, and in how they number the target's layers. Each choice is noted with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.rotary import rope_fields
from specserve.methods import DraftSettings, method_of
from specserve.models.base import TargetModel
from specserve.models.config import (
    COUNT,
    LIST,
    OBJECT,
    ModelConfig,
    Values,
    check,
    check_rope_fields,
    layer_config,
    read_json,
    rope_config,
)
from specserve.models.draft.block import CONFIDENCE, BlockConfig, BlockHead, CorrectionKind, MarkovKind
from specserve.models.draft.fields import check_kind
from specserve.models.draft.load import DraftSource, LoadedDraft, load_draft, read_ids, shared_out
from specserve.models.tensor_files import TensorFiles

_THETA = 1e6  # default of rope_theta, as in other servers
_CANDIDATES = 16  # default number of candidates of DFlash2's selector
_IDS = Values("a list of integers", lambda found: type(found) is list and {*map(type, found)} == {int})
# Known drafts that are not supported, by a part of a tensor's name.
_FOREIGN = {
    "logit_head.": "an early export (logit_head)",
    "aux_hidden_norms": "norms of the target's states (aux_hidden_norms)",
    "attention_sink_bias": "attention sinks",
    "mask_embedding": "its own mask embedding",
    "feedforward_layernorm": "Gemma's layers",
}
_SELECTOR = "candidate_selector.hidden_projection.weight"
_KINDS = {"markov_head.markov_w1.weight": "DSPARK", "prefix_gru.weight_ih_l0": "DOMINO", _SELECTOR: "DFLASH2"}
_PLAIN: dict[str, Any] = {  # the only supported values of these fields
    "use_aux_hidden_state": True,
    "use_swa": False,
    "causal": False,
    "attention_value_scale": 1,
    "output_multiplier": 1,
    "final_logit_softcapping": None,
    "pure_draft_prefix_len": 1,
}


@dataclass(frozen=True, slots=True)
class BlockSource(DraftSource):
    """A checkpoint. ``config`` is flat; nested fields take precedence."""

    config: Mapping[str, Any]
    unread = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # the target's, or read separately

    @property
    def kind(self) -> str:
        found = (kind for name, kind in _KINDS.items() if name in self.files)
        return next(found, "DFLASH")

    def number(self, name: str) -> int:
        """Return a positive integer of its config. Raises ValueError for anything else."""
        check(self.config, self.config_file, COUNT, name)
        found: int = self.config[name]
        return found

    @property
    def slots(self) -> tuple[bool, str]:
        """Whether slot k of a block scores the token after it, and the reason."""
        config = self.config
        for name in ("sample_from_anchor", "shift_label"):
            if isinstance(config.get(name), bool):
                return config[name], f"its config's {name}"
        if "speculators_model_type" in config:
            return False, "a speculators file without sample_from_anchor"
        if "DSpark" in str(config.get("architectures")) or config.get("projector_type") == "dspark":
            return True, "its config names DSpark"
        if not config["nested"]:
            return True, "fields at the top of its config: DeepSpec's"
        return False, "dflash_config: z-lab's"

    @property
    def levels(self) -> int:
        """Tokens that a block drafts. Files with ``shift_label`` don't use the last slot."""
        all_slots = self.slots[0] and (self.kind == "DSPARK" or "shift_label" not in self.config)
        return self.number("block_size") - (not all_slots)

    def taps(self, target_layers: int) -> tuple[int, ...]:
        """Return boundaries of the target's residual stream. Raises ValueError if the target lacks one."""
        name, inputs = "target_layer_ids", "aux_hidden_state_layer_ids"
        if self.config.get(inputs):
            name, shift, why = inputs, 0, "inputs of layers"
        elif self.config.get(name):
            shift, why = 1, "outputs of layers; -1 is the embedding"
        if (given := self.config.get(name)) is None:
            count = self.layer_count
            given, shift, why = default_ids(target_layers, count), 1, f"the default of {count} layers"
        check({name: given}, self.config_file, _IDS, name)
        taps = tuple(i + shift for i in given)
        if not all(0 <= tap <= target_layers for tap in taps):
            raise ValueError(
                f"{self.config_file}: {name} {given} do not fit a target of {target_layers} layers: expected "
                f"{-shift} to {target_layers - shift}"
            )
        self.note(f"reads the target's residual stream before layers {list(taps)} ({name} {given}: {why})")
        return taps

    @property
    def layer_count(self) -> int:
        found = {int(m[1]) for n in self.files.names() if (m := re.match(r"layers\.(\d+)\.", n))}
        return 1 + max(found, default=-1)

    def layer(self) -> LayerConfig:
        layer = layer_config(self.config, self.config_file)
        attention = "layers.0.self_attn."
        return replace(
            layer,
            qkv_bias=f"{attention}q_proj.bias" in self.files,
            o_bias=f"{attention}o_proj.bias" in self.files,
            mlp_bias="layers.0.mlp.down_proj.bias" in self.files,
            qk_norm=f"{attention}q_norm.weight" in self.files,
        )

    @property
    def correction(self) -> tuple[CorrectionKind | None, int, int]:
        """Kind, width and memory of the head that corrects scores."""
        files = self.files
        if self.kind == "DFLASH":
            return None, 0, 0
        if self.kind == "DOMINO":
            return "domino", files["embed_proj.0.weight"].shape[0], files["prefix_gru.weight_hh_l0"].shape[-1]
        if self.kind == "DFLASH2":
            return "selector", files[_SELECTOR].shape[0], 0
        kinds: dict[str, MarkovKind] = {"gate_proj": "gated", "joint_proj": "rnn"}
        found = (kind for name, kind in kinds.items() if f"markov_head.{name}.weight" in files)
        return next(found, "vanilla"), files["markov_head.markov_w1.weight"].shape[-1], 0

    @property
    def conv(self) -> tuple[int, int] | None:
        """Slots that a convolution mixes, and channels that share weights. Raises ValueError for inconsistent
        shapes."""
        base, projection = (
            f"layers.0.attention_conv.{name}" for name in ("base_kernel", "kernel_projection.weight")
        )
        if base not in self.files:
            return None
        (_, taps, hidden), rows = self.files[base].shape, self.files[projection].shape[0]
        if rows % (2 * taps) or hidden % max(1, rows // (2 * taps)):
            raise ValueError(
                f"{self.files.file(projection)}: tensor {projection} has {rows} rows, expected {2 * taps} times a "
                f"divisor of {hidden}"
            )
        return taps, hidden * 2 * taps // rows

    def stored(self, name: str) -> str:
        name = name.removeprefix("domino.")
        bare = name.removesuffix(".weight")
        return bare if bare.endswith("_codebook") and bare in self.files else name


def open_block(path: Path) -> BlockSource:
    """Read a directory. Raises ValueError naming the file, tensor or field if it holds no block draft."""
    files, file = TensorFiles(path), path / "config.json"
    config, names = read_json(file), files.names()
    check(config, file, OBJECT, "dflash_config", "transformer_layer_config", optional=True)
    for part, what in _FOREIGN.items():
        if any(part in name for name in names):
            raise ValueError(f"{path}: {what} in a block draft: not supported")
    nested = config.get("dflash_config") or {}
    flat = {**config, **(config.get("transformer_layer_config") or {}), **nested, "nested": bool(nested)}
    check_rope_fields(flat, file)
    source = BlockSource(files, flat)
    if "hidden_norm.weight" not in files or not source.layer_count:
        raise ValueError(
            f"{path} holds no block draft: expected tensors hidden_norm.weight and layers.0.self_attn.q_proj.weight, "
            f"found {files.contents}"
        )
    for name, plain in _PLAIN.items():
        if flat.get(name) not in (plain, None):
            raise ValueError(f"{file}: {name} {flat[name]!r} is not supported, expected {plain!r}")
    check(flat, file, COUNT, "selector_top_k", optional=True)
    source.number("block_size")
    if source.levels < 1:
        raise ValueError(f"{file}: block_size must be at least 2, found {flat['block_size']}")
    return source


def block_size(path: Path) -> int:
    """Return how many positions a block takes."""
    return open_block(path).number("block_size")


def default_ids(target_layers: int, count: int) -> list[int]:
    """Return the layers whose outputs a draft of ``count`` layers reads if its config names none."""
    if count == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count)]


def read_block(source: BlockSource, target: ModelConfig, max_positions: int) -> BlockConfig:
    """Return a draft's configuration. Raises ValueError for the first thing that does not fit."""
    config, file = source.config, source.config_file
    for name, expected in {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}.items():
        if (found := config.get(name)) != expected:
            raise ValueError(f"{file}: {name} {found!r} does not fit the target's {expected}")
    mask, size = config.get("mask_token_id"), source.number("block_size")
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise ValueError(
            f"{file}: mask_token_id must be a token id from 0 to {target.vocab_size - 1}, found {mask!r}"
        )
    check_window(config, file, max_positions)
    (after, why), own_head = source.slots, "d2t" in source.files
    where = "after" if after else "at"
    source.note(f"{source.kind}, blocks of {size} (mask token {mask}), {source.levels} levels")
    source.note(f"slot k of a block gives the token {where} it ({why})")
    fields = dict(config)
    if not (rope_fields(fields).get("rope_theta") or fields.get("rope_theta")):
        fields["rope_theta"] = _THETA
        source.note(f"rotary base {_THETA:g} (its config has no rope_theta)")
    (correction, rank, memory), confidence = source.correction, f"{CONFIDENCE}.weight"
    if correction is not None:
        source.note(f"corrects a slot's scores by the tokens before it: {correction}, of width {rank}")
    return BlockConfig(
        layer=source.layer(),
        num_layers=source.layer_count,
        rope=rope_config(fields, file),
        taps=source.taps(target.num_layers),
        block_size=size,
        mask_id=mask,
        after=after,
        levels=source.levels,
        draft_vocab_size=source.files["lm_head.weight"].shape[0] if own_head else target.vocab_size,
        own_head=own_head,
        correction=correction,
        rank=rank,
        memory=memory,
        candidates=config.get("selector_top_k") or _CANDIDATES,
        conv=source.conv,
        confidence=source.files[confidence].shape[-1] if confidence in source.files else 0,
    )


def check_window(config: Mapping[str, Any], file: Path, max_positions: int) -> None:
    """Raise ValueError for a sliding window shorter than a slot: layers attend to the whole text."""
    check(config, file, LIST, "layer_types", optional=True)
    window = config.get("sliding_window")
    if "sliding_attention" in (config.get("layer_types") or ()) and max_positions > (window or 0):
        raise ValueError(
            f"{file}: layer_types has sliding_attention with a window of {window} tokens, but a slot "
            f"has {max_positions} positions; expected a smaller --context-length"
        )


def load_block(draft: DraftSettings, target: TargetModel) -> LoadedDraft[BlockHead]:
    """Load a draft for a target, whose layers come after the target's in the pool.

    Raises ValueError naming the file, the tensor or field and what is expected if they don't fit, and for any override,
    whose fields block drafts do not have.
    """
    source, method = open_block(draft.path), method_of(draft.name)
    check_kind(draft.config_override, source.kind)
    if method is None or source.kind not in method.heads:
        raise ValueError(
            f"{draft.path} holds a {source.kind} draft; --speculative-algorithm is {draft.name}, expected {source.kind}"
        )
    config = read_block(source, target.config, target.max_positions)
    config = shared_out(config, DecoderLayer, draft, target, source)
    ids: Tensor | None = None
    if config.own_head:
        ids = read_ids(source, config.draft_vocab_size, target.config.vocab_size)

    def make(_: BlockSource, target: TargetModel) -> BlockHead:
        return BlockHead(config, target.config.kv_layers, target.max_positions, target)

    return load_draft(draft, target, source, make, ids)
