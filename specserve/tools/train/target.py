"""Run the frozen target that a draft learns from.

Shapes: T tokens of all rows flattened, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.layers.batch import TokenBatch
from specserve.models.draft.block_source import default_ids
from specserve.models.llama import LlamaModel
from specserve.tools.train.attend import CausalAttend
from specserve.tools.train.packing import Batch


@torch.no_grad()
def run_target(model: LlamaModel, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Run the frozen target over a batch, in the dtype of its weights regardless of autocast. Returns its hidden states
    after its final norm ``[T, H]`` and its residual streams at the taps."""
    with torch.autocast(batch.tokens_T.device.type, enabled=False):
        tokens = TokenBatch(batch.tokens_T, batch.positions_T, CausalAttend(batch.packing), taps)
        hidden_TH, tapped = model(tokens)
    return hidden_TH, tapped


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's boundaries 2, N/2 and N - 3, moved apart if the target is too shallow for them."""
    if num_layers < 4:
        raise ValueError(f"a target of {num_layers} layers has no default taps; give --aux-layers")
    middle = max(3, num_layers // 2)
    return 2, middle, max(middle + 1, num_layers - 3)


def default_block_taps(num_layers: int) -> tuple[int, ...]:
    """Return the output boundaries of DFlash's five layers, evenly spaced from the second to the fourth last; fewer for
    a shallow target."""
    return tuple(sorted({id + 1 for id in default_ids(num_layers, 5)}))


def check_block_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError for boundaries that are not layer outputs."""
    if list(taps) != sorted(set(taps)) or taps[0] < 1 or taps[-1] > num_layers:
        raise ValueError(f"--aux-layers must be rising boundaries from 1 to {num_layers}, found {list(taps)}")


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ValueError for boundaries that the target lacks or that other readers of the file would misread."""
    if len(taps) != 3 or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise ValueError(
            f"--aux-layers must be 3 rising boundaries from 0 to {num_layers}, found {list(taps)}"
        )
    if taps[0] == 1:
        raise ValueError(
            "--aux-layers must not begin with 1: servers read such a list as layer outputs and add 1"
        )
