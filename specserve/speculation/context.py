"""What a step works with: the models, the pool, the state, and one batch's view of them.

Shapes: B slots of the batch, M pages a slot, S draft levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specserve_kernels import Prediction, gather_slots
from torch import Tensor

from specserve.attention.base import AttentionBackend
from specserve.kv.pool import KVPool
from specserve.layers.batch import TokenBatch
from specserve.speculation.drafter import Drafter
from specserve.speculation.sampler import Sampling, open_sampling
from specserve.speculation.state import DecodeState, Needs


class Target(Protocol):
    """A target model: see ``models.llama.LlamaModel``."""

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, list[Tensor]]: ...

    def logits(self, hidden_TH: Tensor, out: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that outlives a step. ``drafter`` None: the server runs without speculation."""

    target: Target
    drafter: Drafter | None
    pool: KVPool
    attention: AttentionBackend
    state: DecodeState
    vocab_size: int

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None else ()


@dataclass(frozen=True, slots=True)
class View:
    """The batch's slots, gathered. ``prefix_B``: lengths with the root. ``max_length`` bounds every ``length``, and the
    host knows it. ``logits_XV``: where the target's logits go, None for a place of their own."""

    rows_B: Tensor
    root_B: Tensor
    length_B: Tensor
    prefix_B: Tensor
    pages_BM: Tensor
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
        gathered = gather_slots(rows_B, table.root, table.length, table.pages)
        return cls(rows_B, *gathered, max_length, needs, logits_XV)

    def prediction(self, context: Context) -> Prediction | None:
        """The predicted texts, None if no request has one."""
        return context.state.prediction if self.needs.prediction else None

    def sampling(self, context: Context, levels: int) -> Sampling:
        """The sampler of a step of so many draft levels."""
        return open_sampling(context.state, self.rows_B, self.length_B, ahead=levels + 1, needs=self.needs)
