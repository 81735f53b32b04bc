"""The slow references over checkpoints on disk, which compute what an engine's step should have drafted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.core import SamplingParams
from tests.reference import eagle, llama, tree
from tests.reference.decode import Request, Step, plain, speculative
from tests.reference.models import load_checkpoint
from tests.reference.sampler import draft_log_probs

SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "warm": SamplingParams(temperature=1.0, seed=7, ignore_eos=True),
    "truncated": SamplingParams(temperature=1.3, seed=2**40 + 3, top_k=20, top_p=0.9, min_p=0.02),
    "penalised": SamplingParams(
        temperature=0.8,
        seed=-11,
        presence_penalty=1.0,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias={3: 2.0, 8: -100.0},
        stop_token_ids=[0, 2],
        min_tokens=5,
    ),
}


def half(some: Iterable[Any], others: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Half of all pairs: each value with every second one of the others, and neighbours with other ones."""
    listed = list(others)
    return [(a, b) for i, a in enumerate(some) for j, b in enumerate(listed) if (i + i // 2 + j) % 2 == 0]


def reference_params(params: SamplingParams, prompt: Sequence[int], choice: int = 0) -> dict[str, Any]:
    """As ``tests.reference.sampler.choose`` takes them. The models of these tests have no end token."""
    return {
        "temperature": params.temperature,
        "seed": params.seed or 0,
        "choice": choice,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "repetition": params.repetition_penalty,
        "logit_bias": params.logit_bias,
        "ban": params.stop_token_ids if params.min_tokens else (),
        "ban_until": len(prompt) + params.min_tokens,
    }


@dataclass
class Oracle:
    """A target and one draft. Everything is recomputed from scratch; target forwards are cached."""

    target_path: Path
    draft_path: Path
    overrides: dict[str, Any] = field(default_factory=dict)  # of fields of the draft's config

    def __post_init__(self) -> None:
        self._runs: dict[tuple[int, ...], llama.LlamaOutput] = {}

    @cached_property
    def _target(self) -> Any:
        return load_checkpoint(self.target_path)

    @cached_property
    def _draft(self) -> eagle.Draft:
        state, _ = self._target
        files = load_checkpoint(self.draft_path)
        embed, head = llama.embedding_weight(state), llama.head_weight(state)
        return eagle.make_draft(*files, embed, head, self.overrides)

    def run(self, tokens: Sequence[int]) -> llama.LlamaOutput:
        key = tuple(tokens)
        if key not in self._runs:
            self._runs[key] = llama.forward(*self._target, key)
        return self._runs[key]

    def target(self, tokens: Sequence[int]) -> Tensor:
        return self.run(tokens).logits[-1]

    def draft(self, committed: Sequence[int], path: Sequence[int]) -> Tensor:
        features = eagle.features_of(self._draft, self.run(committed[:-1]))
        return eagle.target_vocab_logits(self._draft, committed, features, path)

    def pool(self, request: Request, committed: tuple[int, ...], steps: int, topk: int) -> tree.Pool:
        """All candidates of the step whose root is the last of ``committed``."""

        def log_probs(path: tuple[int, ...]) -> Tensor:
            return draft_log_probs(self.draft(committed, path), **request.context(committed + path))

        return tree.expand(log_probs, steps, topk)

    def plain(self, request: Request, count: int) -> list[int]:
        return plain(self.target, request, count)

    def speculative(
        self, request: Request, count: int, shape: tuple[int, int, int]
    ) -> tuple[list[int], list[Step]]:
        steps, topk, total = shape
        return speculative(
            self.target, self.draft, request, count, steps=steps, topk=topk, total_tokens=total
        )


def pool_scores(pool: tree.Pool) -> Tensor:
    return torch.tensor([candidate.score for candidate in pool.candidates], dtype=torch.float64)
