"""One pass over the layers that keep a state: what they ask, and what a step's accepted nodes leave.

Shapes as in ``specserve_kernels.reference.recurrent``.
"""

from __future__ import annotations

from dataclasses import dataclass

import specserve_kernels as kernels
import torch
from specserve_kernels import Accepted, Lagged, Left, Runs, Slots, Tree
from torch import Tensor

from specserve.kv.states import States
from specserve.layers.batch import DeltaRule


@dataclass(slots=True)
class StatePass:
    """One pass over the model. ``left``: of nodes, what all layers leave for ``commit``; of prompts, what one does.
    ``where``: of prompts, the places that ``keep_last`` takes; None: nodes, of ``token_T``."""

    states: States
    runs: Runs
    left: Left
    where: tuple[Tensor, ...] | None = None
    token_T: Tensor | None = None

    @classmethod
    def of_tree(cls, states: States | None, slots: Slots, tree: Tree, max_nodes: int) -> StatePass | None:
        """Open the pass of a step; None without states."""
        if states is None:
            return None
        parent_T = None if tree.is_chain else tree.parent_T
        back_TE = kernels.trace_back(parent_T, tree.local_T, tree.levels, states.entries)
        places = tree.q_start, tree.rows_T, tree.position_T
        left = states.room(len(states.inputs_LRWC), len(tree.rows_T))
        runs = Runs(slots.rows_B, slots.length_B, *places, back_TE, max_nodes, states.page)
        return cls(states, runs, left, token_T=tree.token_T)

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
        back_TE = kernels.trace_back(None, local_T, 0, states.entries)
        places = q_start, slots.rows_B[slot_T], position_T
        runs = Runs(slots.rows_B, slots.length_B, *places, back_TE, longest, states.page)
        index_T = torch.arange(len(slot_T), device=slot_T.device)
        where = index_T, runs.rows_T, position_T, (slots.length_B + q_start.diff())[slot_T]
        return cls(states, runs, states.room(1, len(slot_T)), where)

    def __call__(self, ask: DeltaRule) -> Tensor:
        states, runs = self.states, self.runs
        kept, inputs_RWC = Lagged(*(table[ask.layer] for table in states.kept)), states.inputs_LRWC[ask.layer]
        left = Left(*(each[ask.layer if self.where is None else 0] for each in self.left))
        few = ask.b_TV, ask.a_TV, ask.rate_V, ask.bias_V
        inputs = kernels.delta_inputs(ask.x_TC, ask.weight_CK, *few, inputs_RWC, kept.decay_REV, runs, left)
        rule = kernels.delta_nodes if self.where is None else kernels.delta_prompts
        out_TVU = rule(inputs, kept, runs, left.value_TVU)
        if self.where is not None:
            rings = tuple(each[ask.layer, None] for each in states.rings)
            kernels.keep_last(rings, self.left, states.page, *self.where)
        return out_TVU.flatten(1)

    def commit(self, accepted: Accepted) -> None:
        """Advance the states by the accepted nodes, up to where texts end."""
        states, rows_B, length_B = self.states, self.runs.rows_B, self.runs.length_B
        path_BS = accepted.path_BS.contiguous()
        assert self.token_T is not None
        kept_B, *where = kernels.cut_paths(
            self.token_T, path_BS, accepted.count_B, rows_B, length_B, states.ends_RX
        )
        kernels.fold_states(states.kept, rows_B, length_B, kept_B)
        kernels.keep_last(states.rings, self.left, states.page, path_BS.flatten(), *where)
