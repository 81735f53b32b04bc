"""One pass over the layers that keep a state: what they ask, and what a step's accepted nodes leave.

Shapes as in ``specserve_kernels.reference.recurrent``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from specserve_kernels import (
    Accepted,
    DeltaInputs,
    Lagged,
    Runs,
    Slots,
    Tree,
    convolve,
    decays,
    delta_nodes,
    delta_prompts,
    fold_states,
    keep_last,
    rms_norm,
    trace_back,
)
from torch import Tensor

from specserve.kv.states import States
from specserve.layers.batch import DeltaRule

_EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(slots=True)
class StatePass:
    """One pass over the model. ``end_T``: of prompts, the tokens that each token's row has after them; None: nodes,
    whose entries wait in ``left`` for ``commit``."""

    states: States
    runs: Runs
    end_T: Tensor | None = None
    left: list[tuple[Tensor, ...]] = field(default_factory=list)

    @classmethod
    def of_tree(cls, states: States | None, slots: Slots, tree: Tree, max_nodes: int) -> StatePass | None:
        """Open the pass of a step; None without states."""
        if states is None:
            return None
        parent_T = None if tree.is_chain else tree.parent_T
        back_TE = trace_back(parent_T, tree.local_T, tree.levels, states.entries)
        places = tree.q_start, tree.rows_T, tree.position_T
        return cls(states, Runs(slots.rows_B, slots.length_B, *places, back_TE, max_nodes))

    @classmethod
    def of_prompts(
        cls,
        states: States | None,
        slots: Slots,
        q_start: Tensor,
        slot_T: Tensor,
        position_T: Tensor,
        local_T: Tensor,
        longest: int,
    ) -> StatePass | None:
        """Open the pass of prompts' runs, of at most ``longest`` tokens each."""
        if states is None:
            return None
        back_TE = trace_back(None, local_T, 0, states.entries)
        places = q_start, slots.rows_B[slot_T], position_T
        end_T = (slots.length_B + q_start.diff())[slot_T]
        return cls(states, Runs(slots.rows_B, slots.length_B, *places, back_TE, longest), end_T)

    def __call__(self, ask: DeltaRule) -> Tensor:
        states, runs, spec = self.states, self.runs, self.states.spec
        kept, inputs_RWC = Lagged(*(table[ask.layer] for table in states.kept)), states.inputs_LRWC[ask.layer]
        mixed_TC = convolve(ask.x_TC, inputs_RWC, ask.weight_CK, runs)
        *both, value_TI = mixed_TC.split(spec.parts, -1)
        query_TJD, key_TJD = (
            rms_norm(each.reshape(-1, spec.key_size), scale_D, _EPS / spec.key_size).view(
                -1, spec.key_heads, spec.key_size
            )
            for each, scale_D in zip(both, states.scales, strict=True)
        )
        value_TVU = value_TI.unflatten(-1, (spec.value_heads, -1))
        inputs = DeltaInputs(query_TJD, key_TJD, value_TVU, ask.beta_TV, ask.decay_TV)
        decay_TEV = decays(ask.decay_TV, kept.decay_REV, runs)
        rule = delta_nodes if self.end_T is None else delta_prompts
        out_TVU, made_TVU = rule(inputs, decay_TEV, kept, runs)
        left = key_TJD, made_TVU, ask.decay_TV, ask.x_TC
        if self.end_T is None:
            assert len(self.left) == ask.layer, "layers run in order"
            self.left.append(left)
        else:
            index_T = torch.arange(len(runs.rows_T), device=runs.rows_T.device)
            where = index_T, runs.rows_T, runs.position_T, self.end_T
            for table, source in zip((*kept[1:], inputs_RWC), left, strict=True):
                keep_last(table[None], source[None], *where)
        return out_TVU.flatten(1)

    def commit(self, accepted: Accepted) -> None:
        """Advance the states by the accepted nodes."""
        kept, runs, count_B = self.states.kept, self.runs, accepted.count_B
        fold_states(kept, runs.rows_B, runs.length_B, count_B)
        position_BS = (accepted.next_position_BS - 1).where(accepted.place_BS >= 0, -1)
        rows_BS, end_BS = (
            each_B[:, None].expand_as(position_BS) for each_B in (runs.rows_B, runs.length_B + count_B)
        )
        where = [each.flatten() for each in (accepted.path_BS, rows_BS, position_BS, end_BS)]
        tables = *kept[1:], self.states.inputs_LRWC
        for table, sources in zip(tables, zip(*self.left, strict=True), strict=True):
            keep_last(table, torch.stack(sources), *where)
