"""A mixture of experts in a decoder layer, in place of its MLP.

Shapes: T tokens, H hidden size, E experts, K chosen for each token, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import specserve_kernels as kernels
import torch
from specserve_kernels import Rounded, Routes, given
from torch import Tensor, nn

from specserve.layers.config import ExpertsConfig, LayerConfig
from specserve.layers.formats.stored import Joined, full_name
from specserve.layers.linear import Linear
from specserve.layers.ranks import ONE, Update
from specserve.layers.weights import Place, Projection


class Router(nn.Module):
    """Chooses experts. Its parameters have the names of checkpoints."""

    def __init__(self, config: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self.routing = config.routing
        count = config.routing.experts
        self.weight = nn.Parameter(torch.empty(count, hidden_size))
        self.bias = nn.Parameter(torch.empty(count)) if config.router_bias else None
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(count, dtype=torch.float32)) if config.correction else None
        )

    def forward(self, x_TH: Tensor, shared_gate_1H: Tensor | None = None) -> Routes:
        more = self.bias, self.e_score_correction_bias, shared_gate_1H
        return kernels.route(x_TH, self.weight, self.routing, *more)


class Experts(nn.Module):
    """The weights of this rank's experts, stacked in two projections, whose parts are each expert's. ``more``: experts
    behind them, that every token chooses."""

    more: int = 0

    def __init__(self, config: LayerConfig, layer: int) -> None:
        super().__init__()
        assert config.experts is not None
        name = ".".join(filter(None, ["layers", str(layer), config.experts.module, "experts"]))
        size = config.hidden_size
        (*gate_up_parts, down), inner = config.experts.parts, config.experts.inner_size
        self.total, self.numbers = config.experts.routing.experts, config.experts.numbers
        self.inner_size = inner
        self.activation, new = config.activation, config.weights.projection
        gate_up = {f"{n}.{part}": inner for n in self.numbers for part in gate_up_parts}
        self.gate_up_proj = new(name, size, gate_up, config.mlp_bias)
        self.down_proj = new(name, inner, {f"{n}.{down}": size for n in self.numbers}, config.mlp_bias)
        self.gate_up_proj.shares_inputs = True
        for each in (self.gate_up_proj, self.down_proj):
            if isinstance(each, Joined):
                ways = {getattr(piece, "layout", None): part for piece in each.pieces for part in piece.parts}
                found = " and ".join(sorted(ways.values()))
                raise ValueError(
                    f"{full_name(name)}: all experts must be stored in the same way, found different ones for {found}"
                )
            each.stacked = True

    def take(self, gate_up: Projection, down: Projection, size: int) -> None:
        """Have the weights of a shared expert of this inner size stored behind own ones, as those of more experts, if
        it is as wide as some of them, all are here, and it is stored in the same way."""
        count, rest = divmod(size, self.inner_size)
        moves = (gate_up, Place(self.gate_up_proj, count, 0)), (down, Place(self.down_proj, count, 1))
        fits = not rest and len(self.numbers) == self.total and len(gate_up.parts) == 2
        if fits and all(each.fits(place) for each, place in moves):
            for each, place in moves:
                each.move(place)
            self.more = count

    def forward(self, x_TH: Tensor | Rounded, routes: Routes, shared_TH: Tensor | None = None) -> Tensor:
        """Return what this rank adds to the outputs."""
        total = self.total + self.more
        return kernels.run_experts(
            x_TH, routes, self._stacked, self.activation, shared_TH, self.numbers.start, total
        )

    @property
    def _stacked(self) -> kernels.ExpertWeights:
        count = len(self.numbers) + self.more
        gate_up, gate_up_bias_EO, gates_round = self.gate_up_proj.of_experts(count)
        down, down_bias_EH, down_rounds = self.down_proj.of_experts(count)
        return kernels.ExpertWeights(gate_up, down, gate_up_bias_EO, down_bias_EH, (gates_round, down_rounds))

    @property
    @torch.no_grad()
    def words(self) -> str:
        """Their loaded weights and what multiplies them without gradients, for reports."""
        weights, count = self._stacked[:2], len(self.numbers)
        held = [each.values if isinstance(each, kernels.Packed) else each for each in weights]
        kinds = " and ".join(dict.fromkeys(map(_words, weights)))
        by = "Triton, all chosen ones at once" if kernels.runs_triton(held) else "PyTorch, one after another"
        of = "" if count == self.total else f" of {self.total}"
        with_shared = " and the shared one" if self.more else ""
        return f"{count}{of} experts{with_shared} in {kinds}, multiplied by {by}"


def _words(weight: Tensor | kernels.Packed) -> str:
    if isinstance(weight, Tensor):
        return str(weight.dtype).removeprefix("torch.")
    if weight.floats:
        return f"floats of 4 bits in groups of {weight.floats}"
    return "integers of 4 bits" if weight.bits == 4 else str(weight.values.dtype).removeprefix("torch.")


class ExpertsMLP(nn.Module):
    """Adds the outputs of each token's experts, and of the shared one, a ``mlp_class``, which ``Experts`` may take.
    Each rank has some experts, or some channels of them, and the sum over ranks comes last."""

    def __init__(
        self, config: LayerConfig, layer: int, mlp_class: Callable[[LayerConfig, int, str], nn.Module]
    ) -> None:
        super().__init__()
        assert config.experts is not None
        mine = config.experts
        self.ranks = config.ranks
        self.gate = Router(mine, config.hidden_size)
        self.shared_expert = self.shared_expert_gate = None
        if mine.shared_size:  # is read before the others, which may wait for it
            shared = replace(config, intermediate_size=mine.shared_size, ranks=ONE)
            self.shared_expert = mlp_class(shared, layer, f"{mine.module}.{mine.shared_module}")
            if mine.shared_gate:
                self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)
                self.shared_expert_gate.kept_plain = True
        self.experts = Experts(config, layer)
        if self.shared_expert is not None:
            gate_up, down = self.shared_expert.gate_up_proj, self.shared_expert.down_proj
            assert isinstance(gate_up, Projection) and isinstance(down, Projection)
            gate_up.shares_inputs = True
            self.experts.take(gate_up, down, mine.shared_size)
            self.gate.routing = replace(mine.routing, shared=self.experts.more)

    def forward(self, x_TH: Tensor | Rounded, residual_TH: Tensor) -> tuple[Update, Tensor]:
        given_TH, shared_TH = given(x_TH), None
        gate_1H = None if self.shared_expert_gate is None else self.shared_expert_gate.weight
        if self.shared_expert is not None and not self.experts.more:
            shared_TH, _ = self.shared_expert(x_TH, residual_TH)
            if gate_1H is not None:
                shared_TH, gate_1H = kernels.gate_rows(shared_TH, given_TH, gate_1H), None
        made_TH = self.experts(x_TH, self.gate(given_TH, gate_1H), shared_TH)
        return self.ranks.sum_for_norm(made_TH), residual_TH
