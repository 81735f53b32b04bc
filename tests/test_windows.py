"""Sliding windows: the text of transformers over many windows, and the same text however it is computed."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.lossless import make_items
from specserve.attention.base import Frontier, Nodes
from specserve.attention.torch import TorchAttention
from tests.matrix import check_drafted, check_texts_of, prompts
from tests.reference.models import make_gemma3

WINDOW = 8


def test_the_text_of_transformers_over_eight_windows(tmp_path: Path) -> None:
    """In chunks shorter and longer than a window, and in one."""
    path, (prompt,) = make_gemma3(tmp_path, sliding_window=WINDOW), prompts([8 * WINDOW])
    theirs: Any = transformers.Gemma3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    check_texts_of(theirs, path, prompt, 32, (5, 20, 512))


def test_every_text_is_identical(tmp_path: Path) -> None:
    """Prompts before, at and after the ends of windows, in chunks, pages, trees, from the cache and preempted. Scores
    are capped."""
    options: dict[str, Any] = {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5}
    target = make_gemma3(tmp_path / "target", branch_scale=0.04, **options)
    items = make_items(prompts([3, WINDOW - 1, WINDOW, WINDOW + 1, 20, 8 * WINDOW]), 6, 16)
    check_drafted(target, items, slice(6))  # each pair of choices: tests/test_gemma4.py


def random_tree(draws: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    """Masks of ancestors and depths, parents before children."""
    masks, depths = [1], [0]
    for node in range(1, nodes):
        parent = draws.choice([node - 1, draws.randrange(node)])
        masks.append(masks[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    return masks, depths


@pytest.mark.parametrize("window", [1, 3, 7, 40])
@pytest.mark.parametrize("sizes", [[9], [9, 4, 1]])
def test_what_the_nodes_of_a_tree_see(window: int, sizes: list[int]) -> None:
    """Each row of ``visible`` against positions worked out one by one: a node stands ``depth`` after the root."""
    draws, lengths = random.Random(len(sizes)), [20, 3, 33][: len(sizes)]
    trees = [random_tree(draws, size) for size in sizes]
    start = torch.tensor([0, *accumulate(sizes)])
    slots = torch.tensor([slot for slot, size in enumerate(sizes) for _ in range(size)])
    masks = torch.tensor([mask for tree_masks, _ in trees for mask in tree_masks])
    nodes = Nodes(torch.tensor(lengths), start, slots, masks, masks, 8, max(sizes), 48)
    seen_BNL = TorchAttention(4, torch.float64).plan_verify(nodes).visible(window)
    for slot, (length, (own, depths)) in enumerate(zip(lengths, trees, strict=True)):
        for node, mask in enumerate(own):
            last = length + depths[node]
            expected = {position for position in range(length) if position > last - window}
            expected |= {
                length + j for j in range(node + 1) if mask >> j & 1 and length + depths[j] > last - window
            }
            assert set(seen_BNL[slot, node].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("window", [1, 2, 4, 30])
def test_what_a_draft_level_sees(window: int) -> None:
    """Its own path is behind the prefix; it stands at the path's end."""
    scratch = torch.tensor([[[20, 21, 24], [20, 22, 25]]])
    frontier = Frontier(torch.tensor([20]), 1, scratch, 40)
    seen_BKL = TorchAttention(4, torch.float64).plan_draft(frontier).visible(window)
    for row, path in enumerate(scratch[0].tolist()):
        places = [*range(20), *path][-window:]
        assert set(seen_BKL[0, row].nonzero().flatten().tolist()) == {place for place in places if place >= 1}
