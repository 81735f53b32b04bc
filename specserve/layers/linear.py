"""Linear layers whose weights are laid out for the processor they run on.

On a CPU in float32, PyTorch multiplies with the BLAS it was built with, which reads weights row by row and is slow for
the few rows of a decode step. oneDNN, which PyTorch carries too, takes weights packed once in blocks: measured in
docs/decisions/0007-packed-cpu-weights.md. On a GPU ``specserve_kernels.linear`` chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from specserve_kernels import linear
from torch import Tensor, nn

_ROWS_HINT = 8  # the batch size that oneDNN picks the blocks for; good from 1 row to 512


class Linear(nn.Linear):
    """``x @ weight.T + bias``. After ``pack`` the weight is held in oneDNN's layout alone."""

    packed: Tensor | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.packed is None:
            return linear(x_TI, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, self.packed, self.bias, "none", [], "")
        return out

    def pack(self, keep_weight: bool) -> None:
        """Packs the weight and, unless others read it, lets the plain one go."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS_HINT)
        if not keep_weight:
            self.weight = nn.Parameter(self.weight.detach().new_empty(0), requires_grad=False)


def pack_linears(module: nn.Module, keep: Sequence[str] = ()) -> None:
    """Packs every ``Linear`` of a module for inference where that pays: float32 on a CPU with oneDNN.

    A weight that another module holds too (tied embeddings) keeps its plain form as well; so does a layer whose
    name ends with one of ``keep``, because its owner reads rows of it.
    """
    if not torch.backends.mkldnn.is_available():
        return
    holders = Counter(id(p) for child in module.modules() for p in child.parameters(recurse=False))
    for name, child in module.named_modules():
        if (
            isinstance(child, Linear)
            and child.weight.dtype == torch.float32
            and child.weight.device.type == "cpu"
        ):
            child.pack(keep_weight=holders[id(child.weight)] > 1 or name.endswith(tuple(keep)))
