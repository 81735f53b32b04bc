"""The inputs of a step (models, pool, state, and one batch's view of them) and the drafter interface.

Shapes: B slots of the batch, T target tokens, M pages a slot, H hidden size, S draft levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from specserve_kernels import Accepted, Pool, Prediction, Slots, Tree, gather_slots
from torch import Tensor

from specserve.attention.base import AttentionBackend, Plan
from specserve.attention.recurrent import StatePass
from specserve.kv.pool import KVPool
from specserve.kv.spec import KVSpec
from specserve.kv.states import STOPS, States
from specserve.models.base import TargetModel
from specserve.speculation.dynamic_map import DynamicMap
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Continuation, DecodeState, Needs, RowInit, to_device
from specserve.speculation.synthetic import SyntheticAcceptance


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """The inputs of a drafter besides the tokens. ``feature_size`` 0: the state keeps no feature between steps."""

    taps: tuple[int, ...] = ()  # layer boundaries at which it reads the target's residual stream
    last_layer: bool = False  # the target's last layer for every token, in prefill too
    feature_size: int = 0  # numbers kept for each slot, and for each page's last token
    token_feature_size: int = 0  # numbers kept for each token of the pool
    kv_start: int = 0  # first position with an entry of its layers, if these run prompts
    before_windows: int = 0  # tokens before the target's windows whose entries it reads
    deferred: int = 0  # most tokens of a slot that steps without drafts leave to ``catch_up``


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What a drafter may read of the target: hidden states after the final norm and at its taps. ``nodes``, in steps:
    the trees, and the token chosen after each node. ``kept``: what layers that keep a state leave at the nodes."""

    hidden_TH: Tensor
    tapped: Sequence[Tensor]
    nodes: tuple[Tree, Tensor] | None = None
    kept: StatePass | None = None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prefill's tokens, packed by request, and the places of their cache entries. A token has been chosen after each
    final run; ``end_B`` is the position after the run in any case. ``last_BH``: the target's state after its final norm
    at each run's last token. ``plan``: the attention plan of the runs, for the drafter's layers."""

    token_T: Tensor
    position_T: Tensor
    place_T: Tensor
    q_start: Tensor  # [B + 1]
    end_B: Tensor
    next_B: Tensor  # the token that follows; undefined where the run is not final
    final_B: Tensor  # bool
    last_BH: Tensor
    plan: Plan


class Drafter:
    """Proposes continuations. No proposal can change the text. This one never drafts; others override what they need.
    What it keeps on the device for each slot, prefill and each step advance by the accepted tokens alone, so that no
    rejected node leaves a trace in it.

    ``kv``: its layers in the pool, after the target's. ``vocab_size``: number of tokens that it can propose.
    ``dynamic_map``: the dynamic token map that changes these tokens while serving. ``continuation``: longest
    continuation, in tokens, that the host looks up for a slot. ``sources``: drafters that share its trees and are
    measured separately.
    """

    name: str = ""
    needs = DrafterNeeds()
    kv: Sequence[KVSpec] = ()
    vocab_size: int = 0
    dynamic_map: DynamicMap | None = None
    continuation: int = 0
    sources: tuple[str, ...] = ()

    def allocate(self, rows: int, device: torch.device) -> None:
        """Make the tables, one row a slot and the last for padding. Captured steps read them by address."""

    def admit(self, rows_N: Tensor) -> None:
        """Begin anew in the rows of requests that take their slots; prefill comes next."""

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Process the prompts' tokens that no cached page covers, and the token chosen after each prompt. Short
        prompts are captured, with empty runs as padding."""

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Process the emitted tokens, also after steps without drafts, so that drafting can resume at any step, unless
        they are left to ``catch_up``. Return the features ``[T, feature size]`` of which the state keeps the last
        accepted one, or None."""
        return None

    def catch_up(self, context: Context, view: View) -> None:
        """Process what steps without drafts have left of the batch's slots. Comes before they draft, before more than
        ``needs.deferred`` tokens are left, and after a slot is given up whose pages stay cached, before a launch."""
        raise AssertionError("it leaves nothing")

    def set_rows(self, rows_R: Tensor) -> None:
        """Score only these rows of its head from the next step on: int64 on the device, chosen by ``dynamic_map``.
        Changes tensors in place and does not synchronize."""
        raise AssertionError("its tokens are fixed")

    def set_continuations(self, continuations: Sequence[Continuation]) -> None:
        """Write the continuations of different slots, likewise."""
        raise AssertionError("it follows no continuations")

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        """Return candidates of at most ``shape.depth`` levels for every slot, with tensor shapes fixed by ``shape``.
        May write ``shape.reserve`` positions of a slot, from the root's on."""
        raise AssertionError("a step of draft levels needs a drafter")

    def observe(self, view: View, tree: Tree, accepted: Accepted) -> Tensor | None:
        """Compare what each of ``sources`` proposed with the emitted tokens. Return three counts for each source, as
        ``observe_source`` does; None if the tree has only one."""
        return None


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that lives longer than a step. ``states``: of the target's layers that keep one, None if none does.
    ``snapshots``: those of the prefix cache, by number."""

    target: TargetModel
    drafter: Drafter
    pool: KVPool
    attention: AttentionBackend
    state: DecodeState
    vocab_size: int
    synthetic: SyntheticAcceptance | None = None
    states: States | None = None
    snapshots: States | None = None
    fingerprint: str | None = None  # hash of everything besides the request that the text depends on

    def admit(self, rows: Sequence[RowInit]) -> None:
        """Write the rows of requests that take their slots."""
        slots_N = self.state.admit(rows, self.pool.page_feature)
        self.drafter.admit(slots_N)
        if self.states is not None:
            ends = ((row.limit - 1, *row.stop_ids, *[-1] * STOPS)[: 1 + STOPS] for row in rows)
            ends_NX = to_device([*chain.from_iterable(ends)], slots_N.device).view(len(rows), -1)
            self.states.ends_RX.index_copy_(0, slots_N, ends_NX)


@dataclass(frozen=True, slots=True)
class View:
    """The batch's slots, gathered. ``prefix_B``: lengths including the root. ``max_length``: an upper bound of every
    length, known to the host. ``logits_XV``: the buffer for the target's logits, None to allocate one."""

    slots: Slots
    prefix_B: Tensor
    max_length: int
    needs: Needs
    logits_XV: Tensor | None = None

    @classmethod
    def of(
        cls,
        context: Context,
        rows_B: Tensor,
        max_length: int,
        needs: Needs,
        logits_XV: Tensor | None = None,
    ) -> View:
        table = context.state.slots
        root_B, length_B, prefix_B, pages_GBM = gather_slots(rows_B, table.root, table.length, table.pages)
        slots = Slots(rows_B, root_B, length_B, pages_GBM, context.pool.page_size)
        return cls(slots, prefix_B, max_length, needs, logits_XV)

    def prediction(self, context: Context) -> Prediction | None:
        """Return the predicted texts, None if no request has one."""
        return context.state.prediction if self.needs.prediction else None
