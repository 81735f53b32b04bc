"""No drafter: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from specserve_kernels import Accepted, Pool
from torch import Tensor

from specserve.kv.spec import KVSpec
from specserve.speculation.context import Context, DrafterNeeds, FixedTokens, PromptTokens, TargetStates, View
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class NoDrafter(FixedTokens):
    """Proposes nothing, so that no step has draft levels."""

    name = ""
    needs = DrafterNeeds()
    kv: Sequence[KVSpec] = ()
    vocab_size = 0

    def scratch(self, shape: StepShape) -> int:
        return 0

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        pass

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        raise AssertionError("a step of draft levels needs a drafter")

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        return None
