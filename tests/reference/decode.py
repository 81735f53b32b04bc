"""Whole requests, plain and speculative, recomputed from scratch at every step: design sections 3 and 5 in a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .sampler import choose, draft_log_probs
from .tree import ancestors, build_tree, walk

TargetFn = Callable[[Sequence[int]], Tensor]
"""tokens [n] -> the target's logits [V] of the token after them."""
DraftLogitsFn = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(committed tokens, root last; drafted path) -> draft logits over target ids [V], -inf where it has none."""


@dataclass(frozen=True)
class Step:
    drafted: int
    accepted: int  # without the bonus token


@dataclass(frozen=True)
class Request:
    """`params` as in sampler.choose(): seed, choice, temperature, top_k, ..., ban, ban_until (a position)."""

    prompt: tuple[int, ...]
    params: dict[str, Any]

    def context(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Arguments for the choice of the token after `tokens`, which begin with the prompt."""
        output = list(tokens[len(self.prompt) :])
        return {"prompt": self.prompt, "output": output, "position": len(tokens), **self.params}


def plain(target: TargetFn, request: Request, count: int) -> list[int]:
    """`count` tokens after the prompt, one at a time."""
    tokens = list(request.prompt)
    for _ in range(count):
        tokens.append(choose(target(tokens), **request.context(tokens)))
    return tokens[len(request.prompt) :]


def speculative(
    target: TargetFn,
    draft: DraftLogitsFn,
    request: Request,
    count: int,
    *,
    steps: int,
    topk: int,
    total_tokens: int,
) -> tuple[list[int], list[Step]]:
    """The same tokens and what each step did. The prefill's token is the first root and belongs to no step.
    The last step may run past `count`: it is reported whole while its tokens are cut."""
    tokens = list(request.prompt)
    tokens.append(choose(target(tokens), **request.context(tokens)))
    history: list[Step] = []
    while len(tokens) - len(request.prompt) < count:
        committed = tuple(tokens)

        def log_probs(path: tuple[int, ...], committed: tuple[int, ...] = committed) -> Tensor:
            return draft_log_probs(draft(committed, path), **request.context(committed + path))

        nodes = build_tree(log_probs, steps, topk, total_tokens, root_token=tokens[-1])
        parents = [node.parent for node in nodes]
        targets = []
        for index in range(len(nodes)):
            path = tuple(nodes[node].token for node in ancestors(parents, index)[1:])
            targets.append(choose(target(committed + path), **request.context(committed + path)))
        accepted, bonus = walk(nodes, targets)
        tokens.extend(nodes[index].token for index in accepted)
        tokens.append(bonus)
        history.append(Step(len(nodes) - 1, len(accepted)))
    return tokens[len(request.prompt) :][:count], history
