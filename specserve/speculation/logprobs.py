"""Log-probabilities of chosen tokens and prompt tokens under the raw logits, as OpenAI reports them.

Shapes: N tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Logprobs = tuple[Tensor, Tensor, Tensor]
SLICE = 2**24  # most logits computed at a time: 64 MB in float32


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, alternatives: int) -> Logprobs:
    """Return the tokens' log-probabilities ``[N]`` and the most likely ones, ``[N, k]`` values and ids."""
    dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    logprobs_NV = logits_NV.to(dtype).log_softmax(-1)
    best = logprobs_NV.topk(alternatives, dim=-1)
    return logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1), best.values, best.indices


def prompt_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    tokens_N: Tensor,
    alternatives: int,
    vocab_size: int,
) -> Logprobs:
    """Return ``token_logprobs`` of the tokens after the hidden states, computing part of the logits at a time."""
    rows = max(1, SLICE // vocab_size)
    parts = [
        token_logprobs(head(hidden), tokens, alternatives)
        for hidden, tokens in zip(hidden_NH.split(rows), tokens_N.split(rows), strict=True)
    ]
    own, values, ids = (torch.cat(part) for part in zip(*parts, strict=True))
    return own, values, ids
