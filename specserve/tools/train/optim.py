"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from specserve.layers.weights import Projection

OPTIMIZERS = ("adamw", "muon")
WARMUP, WARMUP_SHARE = 100, 0.1
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic that drives singular values into about [0.7, 1.2]
STEPS, MOMENTUM = 5, 0.95  # of Muon


def orthogonalize(x_BMN: Tensor) -> Tensor:
    """Replace the singular values of each matrix by about 1 with Newton-Schulz iterations."""
    x = x_BMN.bfloat16() if x_BMN.is_cuda else x_BMN
    x = x.mT if x_BMN.shape[-2] > x_BMN.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if x_BMN.shape[-2] > x_BMN.shape[-1] else x
    out: Tensor = x.to(x_BMN.dtype)
    return out


class Muon(Optimizer):
    """Orthogonalized Nesterov momentum for weight matrices (Jordan 2024), scaled to AdamW's update size (Liu 2025).

    ``sections`` gives the row counts of parameters that stack several matrices.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        sections: Mapping[Tensor, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._sections = dict(sections or {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            buffers = [self._buffer(p) for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - MOMENTUM)
            updates = torch._foreach_lerp(grads, buffers, MOMENTUM)
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            self._apply(params, updates, group["lr"])

    def _buffer(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum"]
        return buffer

    def _apply(self, params: Sequence[Tensor], updates: Sequence[Tensor], lr: float) -> None:
        """Apply updates. Matrices of one shape are orthogonalized together, tall ones transposed."""
        shapes: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for param, update in zip(params, updates, strict=True):
            rows = list(self._sections.get(param, [param.shape[0]]))
            for p, u in zip(torch.split(param, rows), torch.split(update, rows), strict=True):
                wide = (p.mT, u.mT) if p.shape[0] > p.shape[1] else (p, u)
                shapes[wide[0].shape].append(wide)
        for shape, pairs in shapes.items():
            stacked = orthogonalize(torch.stack([update for _, update in pairs]))
            scale = -lr * 0.2 * math.sqrt(max(shape))
            torch._foreach_add_([p for p, _ in pairs], list(stacked.unbind()), alpha=scale)


def build_optimizers(module: nn.Module, kind: str, lr: float, weight_decay: float) -> list[Optimizer]:
    """Return AdamW for everything, or Muon for the layers' matrices and AdamW for embeddings, heads and vectors."""
    if kind not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, found {kind!r}")
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    outer = {n: p for n, p in named.items() if p.ndim != 2 or "embed_tokens" in n or "lm_head" in n}
    inner = {n: p for n, p in named.items() if n not in outer}
    matrices = [p for p in named.values() if p.ndim == 2]
    if kind == "muon":
        sections: dict[Tensor, list[int]] = {
            p: list(child.parts.values())
            for child in module.modules()
            if isinstance(child, Projection) and child.parts
            for p in child.parameters(recurse=False)
        }
        muon = Muon(inner.values(), lr=lr, weight_decay=weight_decay, sections=sections)
        matrices = [p for p in outer.values() if p.ndim == 2]
        return [muon, _adamw(matrices, outer.values(), lr, weight_decay)]
    return [_adamw(matrices, named.values(), lr, weight_decay)]


def _adamw(matrices: Sequence[Tensor], params: Iterable[Tensor], lr: float, weight_decay: float) -> AdamW:
    """Return AdamW with weight decay on matrices only."""
    ids = {id(p) for p in matrices}
    vectors = [p for p in params if id(p) not in ids]
    groups = [
        {"params": list(matrices), "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = any(p.is_cuda for group in groups for p in group["params"])  # type: ignore[attr-defined]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
}


def rate(schedule: str, step: int, warmup: int | None, progress: float) -> float:
    """Return the factor on the learning rate: a linear warm-up, then ``schedule`` down to 0.

    ``progress`` is the finished share of the run, by steps or by the clock. The warm-up takes ``warmup`` steps; None:
    ``WARMUP`` steps, but at most ``WARMUP_SHARE`` of the run.
    """
    risen = (step + 1) / max(1, WARMUP if warmup is None else warmup)
    if warmup is None:
        risen = max(risen, progress / WARMUP_SHARE)
    return min(1.0, risen) * SCHEDULES[schedule](min(1.0, progress))
