"""What a step works with: the models, the pool, the state, one batch's view of them; and what a drafter is.

Shapes: B slots of the batch, T target tokens, M pages a slot, H hidden size, S draft levels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve_kernels import Accepted, Pool, Prediction, Slots, gather_slots
from torch import Tensor

from specserve.attention.base import AttentionBackend, Plan
from specserve.kv.pool import KVPool
from specserve.kv.spec import KVSpec
from specserve.layers.batch import TokenBatch
from specserve.speculation.dynamic_map import LiveMap
from specserve.speculation.sampler import Sampling, open_sampling
from specserve.speculation.shape import StepShape
from specserve.speculation.state import DecodeState, Needs


class Target(Protocol):
    """A target model: see ``models.llama.LlamaModel``."""

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, list[Tensor]]: ...

    def logits(self, hidden_TH: Tensor, out: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter reads besides the texts. ``feature_size`` 0: nothing of it survives a step in the state."""

    taps: tuple[int, ...] = ()  # boundaries of the target's residual stream
    last_layer: bool = False  # what the target's last layer gives of every token, in prefill as well
    feature_size: int = 0  # numbers kept for each slot, and for each page's last token
    token_feature_size: int = 0  # numbers kept for each token of the pool
    kv_start: int = 0  # first position that has an entry of its layers, for those that run prompts
    tokens_on_host: bool = False  # each step's tokens before the next one, which rules out overlap
    continuation: int = 0  # most tokens of earlier answers that the host says a text goes on with
    reaches: bool = False  # for each slot, how far its own cache goes
    sources: tuple[str, ...] = ()  # whose candidates are told apart, and measured, in one tree


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What a forward of the target leaves to a drafter: states after the final norm, and those at its taps."""

    hidden_TH: Tensor
    tapped: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prefill's tokens, packed by request, and where their cache entries lie. Where a run is final, a token follows
    it; the next token's position is ``end_B`` in any case. ``last_BH``: the target's state after its final norm at each
    run's last token. ``plan``: attention of the runs, for the drafter's layers."""

    token_T: Tensor
    position_T: Tensor
    page_T: Tensor
    offset_T: Tensor
    q_start: Tensor  # [B + 1]
    end_B: Tensor
    next_B: Tensor  # the token that follows, of no meaning where not final
    final_B: Tensor  # bool
    last_BH: Tensor
    plan: Plan


class Drafter(Protocol):
    """Proposes continuations. Whatever it proposes, the text stays the same."""

    name: str
    needs: DrafterNeeds
    kv: Sequence[KVSpec]  # its layers in the pool, after the target's

    @property
    def vocab_size(self) -> int:
        """Tokens that it can propose."""
        ...

    @property
    def live_map(self) -> LiveMap | None:
        """What chooses among them while serving; None: they stay."""
        ...

    def scratch(self, shape: StepShape) -> int:
        """Positions from the root's on that proposing may write in a slot: at most ``shape.reserve``."""
        ...

    def pick(self, rows_R: Tensor) -> None:
        """Draft by these rows of its head from the next step on, those that ``live_map`` chose: int64 on the device.
        Changes tensors in place and waits for nothing."""
        ...

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Learn the prompts' tokens and the one that follows each."""
        ...

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        """Return candidates of at most ``shape.depth`` levels for every slot, in shapes fixed by ``shape``."""
        ...

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Learn the emitted tokens, after steps without drafts as well, so that drafting can resume at any step.

        Returns the features ``[T, feature size]`` of which the state keeps the last, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that outlives a step."""

    target: Target
    drafter: Drafter
    pool: KVPool
    attention: AttentionBackend
    state: DecodeState
    vocab_size: int
    fingerprint: str | None = None  # of all that texts depend on next to the requests


@dataclass(frozen=True, slots=True)
class View:
    """The batch's slots, gathered. ``prefix_B``: lengths with the root. ``max_length`` bounds every length and is known
    to the host. ``logits_XV``: where the target's logits go, None for a place of their own."""

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
        """The predicted texts, None if no request has one."""
        return context.state.prediction if self.needs.prediction else None

    def sampling(self, context: Context, levels: int) -> Sampling:
        """Open the sampler of a step of ``levels`` draft levels."""
        slots = self.slots
        return open_sampling(context.state, slots.rows_B, slots.length_B, ahead=levels + 1, needs=self.needs)
