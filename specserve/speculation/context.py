"""The inputs of a step (models, pool, state, and one batch's view of them) and the drafter interface.

Shapes: B slots of the batch, T target tokens, M pages a slot, H hidden size, S draft levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve_kernels import Accepted, Pool, Prediction, Slots, Tree, gather_slots
from torch import Tensor

from specserve.attention.base import AttentionBackend, Plan
from specserve.kv.pool import KVPool
from specserve.kv.spec import KVSpec
from specserve.layers.batch import TokenBatch
from specserve.methods import Lookahead
from specserve.speculation.dynamic_map import DynamicMap
from specserve.speculation.sampler import Sampling, open_sampling
from specserve.speculation.shape import StepShape
from specserve.speculation.state import DecodeState, Needs


class Target(Protocol):
    """A target model: see ``models.llama.LlamaModel``."""

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, list[Tensor]]: ...

    def logits(self, hidden_TH: Tensor, out: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """The inputs of a drafter besides the tokens. ``feature_size`` 0: the state keeps no feature between steps."""

    taps: tuple[int, ...] = ()  # layer boundaries at which it reads the target's residual stream
    last_layer: bool = False  # the target's last layer for every token, in prefill too
    feature_size: int = 0  # numbers kept for each slot, and for each page's last token
    token_feature_size: int = 0  # numbers kept for each token of the pool
    kv_start: int = 0  # first position with an entry of its layers, if these run prompts
    tokens_on_host: bool = False  # each step's tokens before the next step, which rules out overlap
    continuation: int = 0  # longest continuation, in tokens, that the host looks up for a slot
    reaches: bool = False  # the length of its own cache, for each slot
    sources: tuple[str, ...] = ()  # drafters that share a tree and are measured separately
    lookahead: Lookahead | None = None  # a window and a pool of n-grams of these sizes, for each slot


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What a drafter may read of the target: hidden states after the final norm and at its taps. ``nodes``, in steps:
    the trees, and the token chosen after each node."""

    hidden_TH: Tensor
    tapped: Sequence[Tensor]
    nodes: tuple[Tree, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prefill's tokens, packed by request, and the places of their cache entries. A token has been chosen after each
    final run; ``end_B`` is the position after the run in any case. ``last_BH``: the target's state after its final norm
    at each run's last token. ``plan``: the attention plan of the runs, for the drafter's layers."""

    token_T: Tensor
    position_T: Tensor
    page_T: Tensor
    offset_T: Tensor
    q_start: Tensor  # [B + 1]
    end_B: Tensor
    next_B: Tensor  # the token that follows; undefined where the run is not final
    final_B: Tensor  # bool
    last_BH: Tensor
    plan: Plan


class Drafter(Protocol):
    """Proposes continuations. No proposal can change the text."""

    name: str
    needs: DrafterNeeds
    kv: Sequence[KVSpec]  # its layers in the pool, after the target's

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it can propose."""
        ...

    @property
    def dynamic_map(self) -> DynamicMap | None:
        """The dynamic token map that changes these tokens while serving; None: they are fixed."""
        ...

    def scratch(self, shape: StepShape) -> int:
        """Return how many positions of a slot, from the root's on, proposing may write: at most ``shape.reserve``."""
        ...

    def set_rows(self, rows_R: Tensor) -> None:
        """Score only these rows of its head from the next step on: int64 on the device, chosen by ``dynamic_map``.
        Changes tensors in place and does not synchronize."""
        ...

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Process the prompts' tokens and the token chosen after each prompt."""
        ...

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        """Return candidates of at most ``shape.depth`` levels for every slot, with tensor shapes fixed by ``shape``."""
        ...

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Process the emitted tokens, also after steps without drafts, so that drafting can resume at any step. Return
        the features ``[T, feature size]`` of which the state keeps the last accepted one, or None."""
        ...


class FixedTokens:
    """A base of drafters that always propose from the same tokens."""

    dynamic_map = None

    def set_rows(self, rows_R: Tensor) -> None:
        raise AssertionError("its tokens are fixed")


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that lives longer than a step."""

    target: Target
    drafter: Drafter
    pool: KVPool
    attention: AttentionBackend
    state: DecodeState
    vocab_size: int
    fingerprint: str | None = None  # hash of everything besides the request that the text depends on


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
        root_B, length_B, prefix_B, pages_BM = gather_slots(rows_B, table.root, table.length, table.pages)
        slots = Slots(rows_B, root_B, length_B, pages_BM, context.pool.page_size)
        return cls(slots, prefix_B, max_length, needs, logits_XV)

    def prediction(self, context: Context) -> Prediction | None:
        """Return the predicted texts, None if no request has one."""
        return context.state.prediction if self.needs.prediction else None

    def sampling(self, context: Context, levels: int) -> Sampling:
        """Return the sampler of a step of ``levels`` draft levels."""
        slots = self.slots
        return open_sampling(context.state, slots.rows_B, slots.length_B, ahead=levels + 1, needs=self.needs)
