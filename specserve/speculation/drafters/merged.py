"""A model's drafts and copied text in one tree, competing for the same nodes.

Select takes the likeliest candidates of both. If their probabilities are right, that is at least as good as either
alone: of all trees of that size, the selected one has the most expected accepted tokens. Each source's claims are
therefore compared with each request's text at every step, and its log-probabilities are weighted accordingly: see
``specserve_kernels.reference.tree.sources``.

Shapes: B slots.
"""

from __future__ import annotations

from dataclasses import replace

from specserve_kernels import Accepted, Pool, merge_pools
from torch import Tensor

from specserve.methods import parts_of
from specserve.speculation.context import Context, Drafter, PromptTokens, TargetStates, View
from specserve.speculation.drafters import load_drafter
from specserve.speculation.drafters.config import DrafterConfig
from specserve.speculation.dynamic_map import DynamicMap
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape


class MergedDrafter:
    """Runs ``model`` for the shape's levels and ``lookup``, which keeps no state, for the copied levels."""

    def __init__(self, name: str, model: Drafter, lookup: Drafter) -> None:
        self.name = name
        self.needs = replace(
            model.needs, sources=(model.name, lookup.name), continuation=lookup.needs.continuation
        )
        self.kv = model.kv
        self._model = model
        self._lookup = lookup

    @classmethod
    def load(cls, config: DrafterConfig) -> MergedDrafter:
        """Load both. Raises ValueError for a head that does not fit."""
        model, lookup = (load_drafter(replace(config, name=part)) for part in parts_of(config.name))
        return cls(config.name, model, lookup)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def dynamic_map(self) -> DynamicMap | None:
        return self._model.dynamic_map

    def scratch(self, shape: StepShape) -> int:
        return self._model.scratch(shape)

    def set_rows(self, rows_R: Tensor) -> None:
        self._model.set_rows(rows_R)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        self._model.prefill(context, view, prompts, states)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        sources = context.state.sources
        assert sources is not None and shape.copied
        own = self._model.propose(context, view, shape, sampling)
        text = self._lookup.propose(context, view, replace(shape, levels=shape.copied), sampling)
        model_B1, lookup_B1 = sources.weight_RN[view.slots.rows_B].to(own.scores_BP.dtype).split(1, dim=1)
        weighed = replace(text, scores_BP=text.scores_BP * (lookup_B1 / model_B1))
        return replace(merge_pools(own, weighed), parts=(own, text))

    def commit(self, context: Context, accepted: Accepted, states: TargetStates) -> Tensor | None:
        return self._model.commit(context, accepted, states)
