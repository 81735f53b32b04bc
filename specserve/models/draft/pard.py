"""PARD's checkpoints: an ordinary causal model whose config names a mask token, ``pard_token``."""

from __future__ import annotations

from pathlib import Path

from specserve.models.config import read_json

MOST_LEVELS = 16  # the published ones were trained for 8 to 12; of a pass's rows a slot has 64 at most


def read_mask(path: Path) -> int:
    """Return the mask token of a checkpoint. Raises ValueError naming file and field where there is none."""
    file = path / "config.json"
    config = read_json(file)
    mask, kind = config.get("pard_token"), config.get("spd_type")
    if type(mask) is not int or not 0 <= mask < config.get("vocab_size", 0):
        raise ValueError(
            f"{file}: pard_token must be a token id of the model, found {mask}: PARD takes models that were trained "
            "with one; others of the target's tokens are for --speculative-algorithm STANDALONE"
        )
    if kind not in (None, "pard"):
        raise ValueError(f"{file}: spd_type must be pard, found {kind}")
    return mask


def count_levels(path: Path) -> int:
    """How many levels are drafted at most."""
    read_mask(path)
    return MOST_LEVELS
