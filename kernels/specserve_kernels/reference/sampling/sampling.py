"""From logits to a token: penalties, bias, truncation, perturbed argmax. Nothing here changes its inputs.

Shapes: N rows (tree nodes, or prompts' last tokens), V vocabulary, A path tokens, E bias entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalize(
    logits_NV: Tensor,
    counts_NV: Tensor,
    seen_NV: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
) -> Tensor:
    """Apply the repetition penalty to tokens in prompt or output, then frequency and presence penalties by output
    counts.

    ``counts_NV`` int: occurrences in the output up to the row; ``seen_NV`` bool: in the prompt or the output.
    """
    repetition_N1 = repetition_N[:, None]
    scaled_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(seen_NV, scaled_NV, logits_NV)
    logits_NV = logits_NV - frequency_N[:, None] * counts_NV
    return logits_NV - presence_N[:, None] * (counts_NV > 0)


def add_bias(
    logits_NV: Tensor, ids_NE: Tensor, values_NE: Tensor, until_NE: Tensor, position_N: Tensor
) -> Tensor:
    """Add sparse biases to tokens while the position being chosen is before ``until``. Ids of V or more are padding.
    Entries of one token add up."""
    size = logits_NV.shape[-1]
    values_NE = torch.where(position_N[:, None] < until_NE, values_NE, 0).to(logits_NV.dtype)
    bias_NV = logits_NV.new_zeros(len(logits_NV), size + 1)
    bias_NV.scatter_add_(1, ids_NE.clamp(max=size), values_NE)
    return logits_NV + bias_NV[:, :size]


def truncate(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> Tensor:
    """Set to -inf what top-k, top-p and min-p (in this order, on logits / temperature) cut off.

    They are defined by thresholds, so that ties are kept or cut together: top-k keeps values that reach the k-th
    largest (k of 0 or less: all); top-p keeps tokens with less than p of the probability strictly above them; min-p
    keeps ``p >= min_p * max p``. Rows at temperature 0 stay as they are.
    """
    sampled_N1 = temperature_N[:, None] > 0
    scaled_NV = logits_NV / torch.where(sampled_N1, temperature_N[:, None], 1)
    sorted_NV = scaled_NV.sort(dim=-1, descending=True).values
    size = logits_NV.shape[-1]
    kth_N1 = torch.where(top_k_N > 0, top_k_N, size).clamp(max=size)[:, None] - 1
    floor_N1 = sorted_NV.gather(1, kth_N1)
    kept_NV = sorted_NV.masked_fill(sorted_NV < floor_N1, -torch.inf).softmax(-1)
    above_NV = torch.nn.functional.pad(kept_NV.cumsum(-1), (1, -1))
    kept_N1 = ((above_NV < top_p_N[:, None]) | (top_p_N[:, None] >= 1)).sum(-1, keepdim=True)
    kept_N1 = kept_N1.clamp(min=1)  # a top_p that underflows to 0 still keeps the best
    floor_N1 = torch.maximum(floor_N1, sorted_NV.gather(1, kept_N1 - 1))
    floor_N1 = torch.maximum(floor_N1, sorted_NV[:, :1] + min_p_N[:, None].log())
    return logits_NV.masked_fill((scaled_NV < floor_N1) & sampled_N1, -torch.inf)


def perturb(logits_NV: Tensor, noise_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Return ``logits + temperature * noise``, whose argmax is a sample of softmax(logits / temperature)."""
    return torch.addcmul(logits_NV, noise_NV, temperature_N[:, None].to(logits_NV.dtype))
