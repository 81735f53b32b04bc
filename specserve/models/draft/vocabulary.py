"""Draft vocabularies, and which tokens two models with the same tokenizer share, though vocabularies may be padded
differently."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specserve.models.special_tokens import token_ids

_SENTENCEPIECE = "tokenizer.model"


@dataclass(frozen=True, slots=True)
class VocabMap:
    """A draft vocabulary: ``ids`` [Vd] target ids; ``inverse`` [V + 1] draft ids, Vd for the pad id and tokens outside
    it."""

    ids: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> VocabMap:
        inverse = torch.full((vocab_size + 1,), len(ids), dtype=torch.int64, device=ids.device)
        inverse[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, inverse)

    def exchange(self, ids: Tensor) -> None:
        """Replace the target ids by as many others, int64 on the same device. In place, because captured steps read
        both tables by address."""
        self.ids.copy_(ids)
        self.inverse.fill_(len(ids)).scatter_(0, ids, torch.arange(len(ids), device=ids.device))


def shared_tokens(target: Path, draft: Path, target_size: int, draft_size: int) -> tuple[int, str]:
    """Return how many tokens, from id 0 on, both models have rows for, and how that was determined. ``target``,
    ``draft``: directories with tokenizers. Raises ValueError naming the first token that differs, or what can't be
    compared."""
    both = min(target_size, draft_size)
    ours, theirs = token_ids(target), token_ids(draft)
    if ours is not None and theirs is not None:
        for token in sorted(
            ours | theirs, key=lambda token: min(ours.get(token, both), theirs.get(token, both))
        ):
            a, b = ours.get(token), theirs.get(token)
            if a != b and min(both if each is None else each for each in (a, b)) < both:
                raise ValueError(
                    f"{draft} has another tokenizer than the target: {token!r} is {_id(b)} there and {_id(a)} in "
                    f"{target}; expected the same tokens"
                )
        return both, "the tokenizers agree"
    files = [directory / _SENTENCEPIECE for directory in (target, draft)]
    if all(file.exists() for file in files):
        if files[0].read_bytes() != files[1].read_bytes():
            raise ValueError(f"{files[1]} differs from {files[0]}; expected the same tokenizer")
        return both, f"both have the same {_SENTENCEPIECE}"
    if target_size != draft_size:
        lacking = target if ours is None else draft
        raise ValueError(
            f"{draft} has a vocabulary of {draft_size} tokens, the target one of {target_size}, and {lacking} has no "
            "tokenizer.json to compare; expected the same size, or two tokenizers"
        )
    return both, "the vocabularies have the same size; no tokenizers were compared"


def _id(number: int | None) -> str:
    return "none" if number is None else str(number)
