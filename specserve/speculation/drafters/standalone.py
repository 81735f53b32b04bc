"""A separate model as the draft: any supported architecture with the target's tokens, run autoregressively.

Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318. Its layers follow the target's in the pool,
and a token's entry is at the token's own slot. Prompts run through it after the target; emitted tokens as in
``window``.

Shapes: B slots, N nodes of a level, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from specserve_kernels import Level, Pool
from torch import Tensor

from specserve.kv.spec import KVSpec
from specserve.layers.batch import TokenBatch
from specserve.layers.linear import PLAIN, pack_linears, quantize_linears
from specserve.methods import DraftSettings
from specserve.models.base import TargetModel
from specserve.models.checkpoint import load_target
from specserve.models.config import read_json
from specserve.models.draft.fields import refuse_overrides
from specserve.models.draft.vocabulary import VocabMap, shared_tokens
from specserve.models.read_config import load_model_config
from specserve.speculation.context import Context, PromptTokens, TargetStates, View
from specserve.speculation.drafters.window import Window, WindowDrafter
from specserve.speculation.expand import attend_level, expand
from specserve.speculation.sampler import Sampling
from specserve.speculation.shape import StepShape

log = logging.getLogger(__name__)


class StandaloneDrafter(WindowDrafter):
    """Runs ``model``, whose first layer is the pool's layer ``layer``. ``shared``: the tokens that both models have are
    the first so many of ``vocab_size`` of the target's."""

    def __init__(self, name: str, model: TargetModel, layer: int, shared: int, vocab_size: int) -> None:
        self.name = name
        self.kv: Sequence[KVSpec] = model.config.kv(model.dtype)
        self.vocab_size = shared
        self._model = model
        self._layer = layer
        ids = torch.arange(shared, device=model.device)
        self._vocab = VocabMap.of(ids, vocab_size) if shared < vocab_size else None

    @classmethod
    def load(cls, draft: DraftSettings, target: TargetModel) -> StandaloneDrafter:
        """Load the model. Raises ValueError for one of other tokens."""
        refuse_overrides(draft.config_override, draft.name)
        config = load_model_config(draft.path, random="draft." if draft.random else None)
        if config.states:
            raise ValueError(
                f"the draft {draft.path} keeps states: a {config.architecture} can only be a target"
            )
        model = load_target(draft.path, target.dtype, target.device, target.max_positions, config)
        size, own = target.config.vocab_size, model.config.vocab_size
        assert draft.tokenizer is not None
        shared, why = shared_tokens(draft.tokenizer, draft.path, size, own)
        log.info("draft of %d layers and %d tokens: %s", model.config.num_layers, own, why)
        if cls is StandaloneDrafter and "pard_token" in read_json(draft.path / "config.json"):
            log.info(
                "the draft was trained to draft all levels in one pass: use --speculative-algorithm PARD"
            )
        longest, _ = model.config.longest_context
        if longest < target.config.longest_context[0]:
            log.info("the draft was trained for %d positions: it guesses worse after these", longest)
        if draft.quantization != "none" and model.config.weights is not PLAIN:
            log.info("the draft's weights stay as its checkpoint quantizes them")
        else:
            leave = ("lm_head",) if model.config.tie_word_embeddings else ()
            quantize_linears(model, draft.quantization, leave)
        pack_linears(model)
        return cls(draft.name, model, target.config.kv_layers, shared, size)

    def prefill(self, context: Context, view: View, prompts: PromptTokens, states: TargetStates) -> None:
        """Run the prompts' tokens; the token that follows is left to the next step."""
        attend = self._attend(context, prompts.plan, view.slots, prompts.place_T)
        self._run(TokenBatch(prompts.token_T, prompts.position_T, attend, wanted_W=prompts.q_start[1:] - 1))
        self._reached_R[view.slots.rows_B] = prompts.end_B

    def propose(self, context: Context, view: View, shape: StepShape, sampling: Sampling) -> Pool:
        window = self._window(context, view, shape)

        def forward(level: Level, depth: int) -> Tensor:
            if depth == 0:
                return self._scores(self._run_window(context, view, window)[window.root_B])
            attend = attend_level(context, view, level, depth, kv_start=0, first_layer=self._layer)
            return self._scores(self._run(TokenBatch(level.token_N, level.position_N, attend)))

        return self._proposed(view, window, expand(context, view, shape, sampling, self._vocab, forward))

    def _run_window(self, context: Context, view: View, window: Window) -> Tensor:
        return self._run(window.rows.batch)

    def _run(self, batch: TokenBatch) -> Tensor:
        """Run the model. A token that it lacks is replaced by another, which makes guesses worse. Unused rows have no
        meaning."""
        known_T = batch.tokens_T.clamp(0, self._model.config.vocab_size - 1)
        hidden_TH: Tensor = self._model(replace(batch, tokens_T=known_T))[0]
        return hidden_TH

    def _scores(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits of the tokens that the target has too."""
        logits_NV = self._model.logits(hidden_NH)
        return logits_NV[:, : self.vocab_size].contiguous()
