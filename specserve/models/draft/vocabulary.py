"""Check that a draft model has the target's tokens: the same tokenizer, though vocabularies may be padded
differently."""

from __future__ import annotations

from pathlib import Path

from specserve.models.special_tokens import token_ids

_SENTENCEPIECE = "tokenizer.model"


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
