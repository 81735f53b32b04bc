"""Run the frozen target that a draft learns from.

Shapes: T tokens of all rows flattened, H hidden size, V vocabulary, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specserve.layers.batch import TokenBatch
from specserve.models.base import TargetModel
from specserve.models.draft.block_source import default_ids
from specserve.tools.train.attend import CausalAttend
from specserve.tools.train.packing import Batch

NORMAL_MEDIAN = 0.6745  # of the absolute value of a normal variable of deviation 1


@torch.no_grad()
def run_target(model: TargetModel, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Run the frozen target over a batch, in the dtype of its weights regardless of autocast. Returns its hidden states
    after its final norm ``[T, H]`` and its residual streams at the taps."""
    with torch.autocast(batch.tokens_T.device.type, enabled=False):
        tokens = TokenBatch(batch.tokens_T, batch.positions_T, CausalAttend(batch.packing), taps)
        hidden_TH, tapped = model(tokens)
    return hidden_TH, tapped


@torch.no_grad()
def predictions(model: TargetModel, hidden_TH: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the target's greedy tokens ``[T]`` and its probabilities in float32, of the tokens ``ids`` or of all."""
    logits_TV = model.logits(hidden_TH)
    among = logits_TV if ids is None else logits_TV[:, ids]
    return logits_TV.argmax(-1), torch.softmax(among.float(), dim=-1)


class TapSizes(nn.Module):
    """Divides each channel of the target's states at taps by its usual size. ``fold`` makes that a part of ``fc``.

    States grow from layer to layer. In many targets, a few channels are far larger than all others, and the states of
    a few tokens, mostly the first, are a hundred times larger than the rest. A size is therefore a median over tokens.
    """

    size_KH: Tensor

    def __init__(self, taps: int, target: TargetModel) -> None:
        super().__init__()
        self.register_buffer("size_KH", torch.ones(taps, target.config.hidden_size, device=target.device))

    @torch.no_grad()
    def measure(self, model: TargetModel, batch: Batch, taps: tuple[int, ...]) -> None:
        """Take the sizes of a batch's learned tokens, or of all if there is none. Channels smaller than most are left
        as small as they are."""
        _, tapped = run_target(model, batch, taps)
        chosen_T = batch.mask_T | ~batch.mask_T.any()
        for size_H, x_TH in zip(self.size_KH, tapped, strict=True):
            size_H.copy_(x_TH[chosen_T].float().abs().median(0).values / NORMAL_MEDIAN)
            size_H.clamp_(min=size_H.median())

    def forward(self, tapped: Sequence[Tensor]) -> list[Tensor]:
        return [x_TH / size_H.to(x_TH.dtype) for x_TH, size_H in zip(tapped, self.size_KH, strict=True)]

    @torch.no_grad()
    def fold(self, fc: nn.Module) -> None:
        """Scale the columns of ``fc`` so that it reads the target's own states."""
        fc.get_parameter("weight").div_(self.size_KH.flatten())
        self.size_KH.fill_(1)


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
