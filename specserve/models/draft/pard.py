"""PARD's checkpoints: an ordinary causal model whose config names a mask token, ``pard_token``."""

from __future__ import annotations

from pathlib import Path

from specserve.models.config import read_json

MOST_LEVELS = 16  # published models were trained for 8 to 12; a slot has at most 64 rows of a pass


def read_mask(path: Path) -> int:
    """Return the mask token of a checkpoint. Raises ValueError naming file and field if there is none."""
    file = path / "config.json"
    config = read_json(file)
    mask, kind = config.get("pard_token"), config.get("spd_type")
    if type(mask) is not int or not 0 <= mask < config.get("vocab_size", 0):
        raise ValueError(
            f"{file}: pard_token must be a token id of the model, found {mask}: PARD needs a model that was trained "
            "with one; for others with the target's tokens use --speculative-algorithm STANDALONE"
        )
    if kind not in (None, "pard"):
        raise ValueError(f"{file}: spd_type must be pard, found {kind}")
    return mask


def count_levels(path: Path) -> int:
    """Return the most levels that are drafted."""
    read_mask(path)
    return MOST_LEVELS
