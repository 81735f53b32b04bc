"""The tensors that a draft head's config implies, for ``--load-format dummy``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specserve.methods import OWN_HEADS, own_heads
from specserve.models.config import COUNT, check, layer_config
from specserve.models.draft.fields import LIST
from specserve.models.random_tensors import RandomTensors

_TAPS = (0, 0, 0)  # as many states as EAGLE-3 fuses if no list names them


def random_head(path: Path, config: Mapping[str, Any], heads: Sequence[str]) -> RandomTensors:
    """Return random tensors with the names and shapes by which heads are read. ``config``: a head's, flat; ``heads``:
    the kinds that it may be. Raises ValueError naming a field that the shapes need."""
    count, file = own_heads(config)[1], path / "config.json"
    own, named = "MTP" in heads and bool(count), config.get("architectures") or ()
    if "MTP" in heads and count != 0 and not {*OWN_HEADS["NEXTN"]}.isdisjoint(named):
        return RandomTensors(path, {f"layers.{config['num_hidden_layers']}.eh_proj.weight": ()}, "draft.")
    fused = not own and (
        heads[0] not in ("EAGLE", "MTP") or ("draft_vocab_size" in config and "EAGLE3" in heads)
    )
    layer = layer_config(config, file)
    size, factor, prefix = layer.hidden_size, 1 + fused, "mtp_layers.0." if own else "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (layer.num_heads * layer.head_dim, factor * size),
        f"{prefix}self_attn.k_proj.weight": (layer.num_kv_heads * layer.head_dim, factor * size),
        f"{prefix}mlp.gate_proj.weight": (layer.intermediate_size, size),
    }
    if own:
        return RandomTensors(path, shapes | {f"{prefix}self_attn.q_proj.bias": ()}, "draft.")
    shapes["fc.weight"] = (size, 2 * size)
    if fused:
        shapes |= _fused(config, file, size)
    if heads[0] == "P_EAGLE":
        last = config.get("num_hidden_layers", 1) - 1
        mask = {"mask_hidden": shapes["fc.weight"][1:]}
        shapes = {f"layers.{last}.self_attn.q_proj.weight": (), **shapes, **mask}
    return RandomTensors(path, shapes, "draft.")


def _fused(config: Mapping[str, Any], file: Path, size: int) -> dict[str, tuple[int, ...]]:
    """Return what EAGLE-3 has besides EAGLE's tensors: a wider ``fc``, a head and its vocabulary."""
    check(config, file, COUNT, "vocab_size")
    check(config, file, COUNT, "draft_vocab_size", "target_hidden_size", optional=True)
    taps = (config.get("eagle_config") or {}).get(LIST) or config.get(LIST) or _TAPS
    width = len(taps) * (config.get("target_hidden_size") or size)
    rows = config.get("draft_vocab_size") or config["vocab_size"]
    ids = {} if rows == config["vocab_size"] else {"d2t": (rows,)}
    return {"fc.weight": (size, width), "lm_head.weight": (rows, size), **ids}
