"""A model's drafts and copied text in one tree, competing for the same nodes.

Select takes the likeliest candidates of both. If their probabilities are right, that is at least as good as either
alone: of all trees of that size, the selected one has the most expected accepted tokens. Each source's claims are
therefore compared with each request's text at every step, and its log-probabilities are weighted accordingly: see
``specserve_kernels.reference.tree.sources``.

Shapes: B slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from specserve_kernels import Accepted, Pool, Sources, Tree, merge_pools, observe_source
from torch import Tensor

from specserve.methods import DraftSettings, parts_of
from specserve.models.base import TargetModel
from specserve.speculation.context import Context, Drafter, PromptTokens, TargetStates, View
from specserve.speculation.drafters import load_drafter
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape
from specserve.speculation.state import Continuation


class MergedDrafter(Drafter):
    """Runs ``model`` for the shape's levels and ``lookup``, which has no layers, for the copied levels. ``trust``: the
    weights of the two, for each slot."""

    trust: Sources

    def __init__(self, name: str, model: Drafter, lookup: Drafter) -> None:
        self.name = name
        self.needs, self.kv, self.vocab_size = model.needs, model.kv, model.vocab_size
        self.dynamic_map = model.dynamic_map
        self.continuation = lookup.continuation
        self.sources = (model.name, lookup.name)
        self._model = model
        self._lookup = lookup

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> MergedDrafter:
        """Load both. Raises ValueError for a head that does not fit."""
        model, lookup = (load_drafter(replace(draft, name=part), target) for part in parts_of(draft.name))
        return cls(draft.name, model, lookup)

    def allocate(self, rows: int, device: torch.device) -> None:
        self.trust = Sources.empty(rows, len(self.sources), device)
        for drafter in (self._model, self._lookup):
            drafter.allocate(rows, device)

    def admit(self, rows_N: Tensor) -> None:
        self.trust.begin(rows_N)
        for drafter in (self._model, self._lookup):
            drafter.admit(rows_N)

    def set_rows(self, rows_R: Tensor) -> None:
        self._model.set_rows(rows_R)

    def set_continuations(self, continuations: Sequence[Continuation]) -> None:
        self._lookup.set_continuations(continuations)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        self._model.prefill(context, view, prompts, states)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        assert shape.copied
        own = self._model.propose(context, view, shape, sampling)
        text = self._lookup.propose(context, view, replace(shape, levels=shape.copied), sampling)
        weight_B2 = self.trust.weight_RN[view.slots.rows_B].to(own.scores_BP.dtype)
        model_B1, lookup_B1 = weight_B2.split(1, dim=1)
        weighed = replace(text, scores_BP=text.scores_BP * (lookup_B1 / model_B1))
        return replace(merge_pools(own, weighed), parts=(own, text))

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        return self._model.commit(context, view, accepted, states)

    def catch_up(self, context: Context, view: View) -> None:
        self._model.catch_up(context, view)

    def observe(self, view: View, tree: Tree, accepted: Accepted) -> Tensor | None:
        if not tree.parts:
            return None
        emitted = view.slots.rows_B, accepted.token_BS, accepted.count_B
        found = [observe_source(pool, self.trust, i, *emitted) for i, pool in enumerate(tree.parts)]
        return torch.cat(found, dim=1)
