"""Log-probabilities of emitted tokens under the raw logits, as OpenAI reports them.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, alternatives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tokens' log-probabilities ``[N]`` and the most likely ones, ``[N, k]`` values and ids."""
    dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    logprobs_NV = logits_NV.to(dtype).log_softmax(-1)
    best = logprobs_NV.topk(alternatives, dim=-1)
    return logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1), best.values, best.indices
