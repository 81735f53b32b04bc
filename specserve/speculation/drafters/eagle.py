"""EAGLE, EAGLE-2, EAGLE-3 and MiMo's MTP: one decoder layer that runs autoregressively over features.

The head has a single layer, so its keys and values depend on the (feature, token) pair alone: storing an entry takes
fc, norms and two projections, and prefill needs no attention. Steps without drafts only keep the target's states, and
the entries of several are stored at once: these weights are read once for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from specserve_kernels import Accepted, Level, Pool, Slots, first_places, store_page_features
from torch import Tensor

from specserve.attention.paged import store_projected
from specserve.kv.pool import KVPool
from specserve.kv.spec import KVSpec
from specserve.layers.rotary import Rope
from specserve.methods import DraftSettings, MapPlan
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig
from specserve.models.draft.eagle_family import Head, load_head
from specserve.models.draft.head import LayerHead
from specserve.models.draft.reader import Reading
from specserve.models.draft.token_map import PickedRows, read_named_map, score_by, truncate
from specserve.models.draft.vocabulary import VocabMap
from specserve.models.special_tokens import special_tokens
from specserve.speculation.context import Context, Drafter, DrafterNeeds, PromptTokens, TargetStates, View
from specserve.speculation.drafters.deferred import DEFERRED, Deferred
from specserve.speculation.dynamic_map import DynamicMap
from specserve.speculation.expand import attend_level, expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a head drafts. With a dynamic map, ``rows`` are the head's rows that are read, and ``ids_O`` the
    target ids of all its rows."""

    vocab: VocabMap | None
    dynamic_map: DynamicMap | None = None
    rows: PickedRows | None = None
    ids_O: Tensor | None = None

    def set_rows(self, rows_R: Tensor) -> None:
        assert self.rows is not None and self.vocab is not None and self.ids_O is not None
        self.rows.set_rows(rows_R)
        self.vocab.exchange(self.ids_O[rows_R])


class EagleDrafter(Drafter):
    """Drafts with any ``LayerHead``, whose layer follows the target's in the pool: heads differ, drafting does not."""

    def __init__(self, name: str, head: LayerHead, target: ModelConfig, vocabulary: Vocabulary) -> None:
        self.name = name
        self.vocab = vocabulary.vocab
        self.vocab_size = head.vocab_size if self.vocab is None else len(self.vocab.ids)
        self.dynamic_map = vocabulary.dynamic_map
        self.vocabulary = vocabulary
        self.head = head
        self._layer = target.kv_layers
        own, taps = head.config.layer, head.config.taps
        last = not taps or taps[-1] == target.num_layers
        self.needs = DrafterNeeds(taps, last, own.hidden_size, deferred=DEFERRED)
        self.kv: Sequence[KVSpec] = [own.kv(head.dtype)]
        self._sizes = max(len(taps), 1), target.hidden_size

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> EagleDrafter:
        """Load the head. Raises ValueError for one that does not fit."""
        found: Vocabulary | None = None

        def restrict(reading: Reading, head: Head) -> None:
            """Done before quantization, because it may take rows of the head."""
            nonlocal found
            found = _vocabulary(reading, head, draft, target)

        loaded = load_head(draft, target, restrict)
        return cls(draft.name, loaded.module, target.config, found or Vocabulary(loaded.vocab))

    def set_rows(self, rows_R: Tensor) -> None:
        self.vocabulary.set_rows(rows_R)

    def allocate(self, rows: int, device: torch.device) -> None:
        self._deferred = Deferred(rows, *self._sizes, self.head.dtype, device)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Store the entries of the prompts' tokens and of the token that follows, each with the feature of the token
        before it; a run's first token takes the slot's feature. The token at position 0 has no entry."""
        features_TH = self.head.fuse(states.hidden_TH, states.tapped)
        kept_RH, rows_B = context.state.slots.feature, view.slots.rows_B
        before_XH = torch.nn.functional.pad(features_TH, (0, 0, 1, 0))  # the extra row serves empty runs
        before_XH[prompts.q_start[:-1]] = kept_RH[rows_B]
        place_T = prompts.place_T.where(prompts.position_T > 0, -1)
        pool, slots = context.pool, view.slots
        self._store(pool, slots, prompts.token_T, before_XH[:-1], None, prompts.position_T, place_T)
        store_page_features(features_TH, slots, prompts.place_T, pool.page_feature)
        last_BH = features_TH[prompts.q_start[1:] - 1]
        place_B = (first_places(slots) + prompts.end_B).where(prompts.final_B, -1)
        self._store(pool, slots, prompts.next_B, last_BH, None, prompts.end_B, place_B)
        kept_RH[rows_B] = last_BH
        self._deferred.clear(slots)

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        features_XH = context.state.slots.feature

        def forward(level: Level, depth: int) -> Tensor:
            nonlocal features_XH
            attend = attend_level(context, view, level, depth, kv_start=1)
            logits_NV, features_XH = self.head.draft(
                level.token_N, features_XH, level.position_N, attend, level.source_N
            )
            return logits_NV

        return expand(context, view, shape, sampling, self.vocab, forward)

    def commit(self, context: Context, view: View, accepted: Accepted, states: TargetStates) -> Tensor | None:
        """Store the entries of the emitted tokens, each with the feature of the token before it. Without drafts only
        keep the states from which the features are made."""
        slots = view.slots
        if accepted.path_BS.shape[1] == 1:
            self._deferred.keep(slots, states)
            return None
        features_TH = self.head.fuse(states.hidden_TH, states.tapped)
        self._store(
            context.pool,
            slots,
            accepted.next_token_BS.flatten(),
            features_TH,
            accepted.path_BS.flatten(),
            accepted.next_position_BS.flatten(),
            accepted.next_place_BS.flatten(),
        )
        return features_TH

    def catch_up(self, context: Context, view: View) -> None:
        """Store the entries that steps without drafts left, up to the root's."""
        slots, table = view.slots, context.state.slots
        left = self._deferred.take(slots, table.tokens)
        features_NH = self.head.fuse(left.states_NX, [left.states_NX])
        where = left.next_position_N, left.next_place_N
        self._store(context.pool, slots, left.next_token_N, features_NH, None, *where)
        context.pool.page_feature[left.end_page_N] = features_NH
        table.feature[left.last_row_N] = features_NH

    def _store(
        self,
        pool: KVPool,
        slots: Slots,
        tokens_N: Tensor,
        features_XH: Tensor,
        source_N: Tensor | None,
        positions_N: Tensor,
        place_N: Tensor,
    ) -> None:
        """Write the final cache entries of (real feature, token) pairs at the tokens' places. ``source_N`` None: each
        pair's feature is in its own row."""
        projected = self.head.project_kv(tokens_N, features_XH, source_N)
        rope = Rope(self.head.rope_P2R, positions_N, self.head.config.rope.interleaved)
        store_projected(pool, self._layer, projected, rope, slots.pages_GBM, place_N)


def _vocabulary(reading: Reading, head: Head, draft: DraftSettings, target: TargetModel) -> Vocabulary | None:
    """Return the vocabulary that a token map gives a head; None without a map."""
    if draft.token_map is None:
        return None
    if isinstance(draft.token_map, MapPlan):
        return _follow(reading.ids, head, draft, draft.token_map, target)
    size = target.config.vocab_size
    # In ascending order: the file's does not matter, and neighbouring rows are read together.
    ids = read_named_map("--speculative-token-map", draft.token_map, size).sort().values.to(target.device)
    truncate(head, target.lm_head, ids)
    log.info("the draft reads %d of the head's %d rows: %s", len(ids), size, draft.token_map)
    return Vocabulary(VocabMap.of(ids, size))


def _follow(
    ids_O: Tensor | None, head: Head, draft: DraftSettings, plan: MapPlan, target: TargetModel
) -> Vocabulary:
    """Make the head draft what a dynamic map chooses from the tokens that it scores."""
    size, device = target.config.vocab_size, target.device
    ids_O = torch.arange(size) if ids_O is None else ids_O
    flag = "--speculative-token-map-start"
    start = read_named_map(flag, plan.start, size).tolist() if plan.start else []
    assert draft.tokenizer is not None
    kept = special_tokens(draft.tokenizer, target.config)
    dynamic_map = DynamicMap(plan, ids_O.numpy(), size, start, kept)
    ids_O = ids_O.to(device)
    rows_R = torch.from_numpy(dynamic_map.rows_R).to(device)
    rows = score_by(head, rows_R)
    log.info("the draft reads %d of its %d rows, chosen by a dynamic map", len(rows_R), len(ids_O))
    return Vocabulary(VocabMap.of(ids_O[rows_R], size), dynamic_map, rows, ids_O)
