"""Which shape the next step has: few, so that each can be a captured graph."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.spec.tree import StepShape

MAX_STEP_NODES = 512  # with 128k tokens of vocabulary, the logits of so many nodes are 131 MB in bf16
_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes that get graphs, up to ``largest``, which is one of them."""
    more = range(_BUCKETS[-1] + 64, largest, 64)
    return (*(size for size in (*_BUCKETS, *more) if size < largest), largest)


@dataclass(frozen=True, slots=True)
class StaticShapes:
    """One speculation for all steps: ``speculation`` is steps, topk and tokens, None for plain decoding. With
    ``buckets``, batches up to the largest are padded to the next of them."""

    speculation: tuple[int, int, int] | None
    buckets: tuple[int, ...] = ()

    def __call__(self, slots: int, drafting: int) -> StepShape:
        """The shape for a batch of which ``drafting`` slots may have drafts."""
        padded = next((size for size in self.buckets if size >= slots), slots)
        if self.speculation is None or not drafting:
            return StepShape.plain(padded)
        steps, topk, tokens = self.speculation
        if padded in self.buckets:
            drafting = padded  # one shape a bucket; what some slots may not have goes to others
        nodes = padded + drafting * (tokens - 1)
        return StepShape(padded, max(padded, min(nodes, MAX_STEP_NODES)), steps, topk)

    def captured(self) -> list[StepShape]:
        """Every shape that batches within the buckets can have."""
        return list(dict.fromkeys(self(size, drafting) for size in self.buckets for drafting in (0, size)))

    def reserve(self, slots: int) -> int:
        """Most positions that a step of up to so many slots may write in one of them."""
        return max(self(size, size).reserve for size in range(1, slots + 1))

    @property
    def levels(self) -> int:
        return self.speculation[0] if self.speculation is not None else 0
