"""What a step reads of a model's weights. Of experts, only those that its tokens chose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import Shape, generate_timed, scheduler_of
from specserve import LLM
from specserve.engine.runner import Runner
from specserve.layers.experts import Experts, Router
from specserve.layers.linear import QuantizedLinear
from specserve.speculation.context import Context

SAMPLED_STEPS = 8
LEVELS = 7  # of the published curves of acceptance


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes. ``others``: what every step reads of the target; ``experts``: all of them, ``count`` in a layer, of which
    a token chooses ``chosen``. ``once``: of a draft, in a step, and ``level``: at each of its levels."""

    others: int
    experts: int
    count: int
    chosen: int
    once: int
    level: int

    @classmethod
    def of(cls, context: Context) -> Weights:
        target: Any = context.target
        routing = next((each.routing for each in target.modules() if isinstance(each, Router)), None)
        experts = sum(size_of(each) for each in target.modules() if isinstance(each, Experts))
        shared = experts * routing.shared // (routing.experts + routing.shared) if routing else 0
        embedding = 0 if target.config.tie_word_embeddings else size_of(target.embed_tokens)
        head = getattr(context.drafter, "head", None)
        once = size_of(head.fc) if hasattr(head, "fc") else 0
        return cls(
            others=size_of(target) - embedding - experts + shared,
            experts=experts - shared,
            count=routing.experts if routing else 1,
            chosen=routing.chosen if routing else 0,
            once=once,
            level=0 if head is None else size_of(head) - once,
        )

    def drawn(self, tokens: int) -> float:
        """Distinct experts of a layer that so many tokens choose, if each is as likely as another."""
        return self.count * (1 - (1 - self.chosen / self.count) ** tokens)

    def read(self, experts: float) -> float:
        """Of the target, with so many experts a layer."""
        return self.others + self.experts * experts / self.count

    def most_gain(self, rates: Sequence[float], batch: int) -> float:
        """The most that drafting can gain if time is bytes and experts are drawn: tokens a step of a chain of 0 to
        ``LEVELS`` levels in relation to plain decoding's, divided by the bytes in relation. ``rates``: of acceptance by
        level, the last one's of deeper levels."""
        deeper = [*rates, *[rates[-1]] * LEVELS][:LEVELS]
        tokens = accumulate(accumulate(deeper, mul), initial=1.0)
        plain = self.read(self.drawn(batch))
        return max(
            each * plain / (self.read(self.drawn(batch * (1 + k))) + (k > 0) * self.once + k * self.level)
            for k, each in enumerate(tokens)
        )


def size_of(module: torch.nn.Module) -> int:
    """Bytes of its weights, without rotary tables. Of those with a copy of 8 bits only the copy, which few tokens
    read."""
    tables = [buffer for name, buffer in module.named_buffers() if "rope" not in name.rpartition(".")[2]]
    copied = [each.plain for each in module.modules() if isinstance(each, QuantizedLinear)]
    unread = {id(parameter) for each in copied for parameter in each.parameters()}
    read = [parameter for parameter in module.parameters() if id(parameter) not in unread]
    return sum(each.numel() * each.itemsize for each in (*read, *tables))


def experts_read(llm: LLM, prompts: list[list[int]], shape: Shape | None) -> float | None:
    """Distinct experts of a layer that a step of all requests reads: the mean over layers and a few steps. These run
    without graphs, so that their routers can be watched. None: it has none, or several ranks."""
    engine, nodes = scheduler_of(llm), len(prompts) * (shape[2] if shape else 1)
    target: Any = engine.runner.context.target
    routers = [each for each in target.modules() if isinstance(each, Router)]
    found: list[int] = []
    if not routers or engine.runner.followers is not None:
        return None

    def count(router: Router, inputs: Any, routes: Any) -> None:
        if len(routes.expert_TK) == nodes:
            found.append(routes.expert_TK.unique().numel() - router.routing.shared)

    eager = Runner(engine.runner.context)
    eager.masks = engine.runner.masks
    with ExitStack() as stack, patch.object(engine, "runner", eager):
        for each in routers:
            stack.enter_context(each.register_forward_hook(count))
        generate_timed(llm, prompts, SAMPLED_STEPS + len(prompts) // 8)  # those of the last prompts, too
    return fmean(found) if found else None
