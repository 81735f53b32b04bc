"""Configurations in which texts must be the same: tables of choices, and few that cover every pair of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Configuration = dict[str, Any]
_Pair = tuple[tuple[str, Any], tuple[str, Any]]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "logit_bias": {"temperature": 0.9, "logit_bias": {5: 4.0, 9: -100.0, 17: 2.5}},
    "together": {
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.5, 7: -2.0},
        "min_tokens": 6,
    },
}
# Algorithm, then steps, topk and verified tokens of a step.
SPECULATION: dict[str, tuple[str, int, int, int] | None] = {
    "off": None,
    "EAGLE chain": ("EAGLE", 5, 1, 6),
    "EAGLE tree": ("EAGLE", 5, 4, 16),
    "EAGLE3 chain": ("EAGLE3", 5, 1, 6),
    "EAGLE3 tree of 16": ("EAGLE3", 5, 4, 16),
    "EAGLE3 tree of 64": ("EAGLE3", 6, 8, 64),
    "MEDUSA chain": ("MEDUSA", 4, 1, 5),
    "MEDUSA tree": ("MEDUSA", 4, 4, 16),
    "MLP chain": ("MLP_SPECULATOR", 4, 1, 5),
    "MLP tree": ("MLP_SPECULATOR", 3, 3, 12),
    "HYDRA chain": ("HYDRA", 4, 1, 5),
    "HYDRA tree": ("HYDRA", 4, 3, 12),
    "ARCTIC_LSTM chain": ("ARCTIC_LSTM", 3, 1, 4),
    "ARCTIC_LSTM tree": ("ARCTIC_LSTM", 3, 3, 12),
    "REDRAFTER tree": ("REDRAFTER", 3, 3, 12),
    "DFLASH tree": ("DFLASH", 3, 3, 12),
    "DSPARK chain": ("DSPARK", 5, 1, 6),
    "DOMINO chain": ("DOMINO", 4, 1, 5),
    "DFLASH2 tree": ("DFLASH2", 3, 3, 12),
    "STANDALONE chain": ("STANDALONE", 4, 1, 5),
    "STANDALONE tree": ("STANDALONE", 3, 3, 12),
    "PARD chain": ("PARD", 6, 1, 7),
    "PARD tree": ("PARD", 4, 3, 12),
    "GEMMA4_ASSISTANT chain": ("GEMMA4_ASSISTANT", 5, 1, 6),
    "GEMMA4_ASSISTANT tree": ("GEMMA4_ASSISTANT", 4, 3, 12),
    "P_EAGLE chain": ("P_EAGLE", 6, 1, 7),
    "P_EAGLE tree": ("P_EAGLE", 4, 3, 12),
    "NGRAM chain": ("NGRAM", 8, 1, 9),
    "NGRAM tree": ("NGRAM", 6, 3, 16),
    "SUFFIX chain": ("SUFFIX", 8, 1, 9),
    "SUFFIX tree": ("SUFFIX", 6, 3, 16),
    "REST tree": ("REST", 6, 3, 16),
    "LOOKAHEAD": ("LOOKAHEAD", 9, 9, 56),
    "EAGLE3 chain + NGRAM": ("EAGLE3+NGRAM", 3, 1, 12),
    "EAGLE tree + NGRAM": ("EAGLE+NGRAM", 4, 3, 16),
    "MEDUSA tree + NGRAM": ("MEDUSA+NGRAM", 3, 3, 16),
    "DSPARK tree + SUFFIX": ("DSPARK+SUFFIX", 4, 3, 16),
    "EAGLE3 tree + SUFFIX": ("EAGLE3+SUFFIX", 4, 3, 16),
    "GEMMA4_ASSISTANT chain + NGRAM": ("GEMMA4_ASSISTANT+NGRAM", 3, 1, 12),
    "EAGLE3 chain + REST": ("EAGLE3+REST", 3, 1, 12),
}
CHOICES: dict[str, Sequence[Any]] = {
    "speculation": list(SPECULATION),
    "batch": [16, 4, 1],
    "page": [1, 16, 64],
    "pool": ["small", "normal"],
    "toggled": [True, False],
    "prefix_cache": [True, False],
    "chunk": [16, 512],
    "overlap": ["off", "on"],
    "predicted": [True, False],
    "graphs": [True, False],
}
# Too slow to occur in every pair. The controller takes only the method from the speculation.
_LARGE = {
    **{"batch": 64, "page": 16, "pool": "normal", "toggled": True, "prefix_cache": True, "chunk": 512},
    **{"overlap": "on", "predicted": False, "graphs": True, "controller": False},
}
EXTRAS: list[Configuration] = [
    {"speculation": "off", **_LARGE, "toggled": False},
    {
        "speculation": "EAGLE3 chain",
        **_LARGE,
        "page": 1,
        "chunk": 16,
        "predicted": True,
        "prefix_cache": False,
    },
    {"speculation": "EAGLE3 tree of 64", **_LARGE, "page": 64, "graphs": False, "overlap": "off"},
    {"speculation": "EAGLE3 chain", **_LARGE, "batch": 4, "predicted": True, "controller": True},
    {"speculation": "NGRAM chain", **_LARGE, "batch": 16, "chunk": 16, "overlap": "off", "controller": True},
]


def pairwise(choices: Mapping[str, Sequence[Any]]) -> list[Configuration]:
    """Greedy: each configuration takes the first of the still uncovered pairs and then, name by name, the value
    that covers most of those left. Deterministic."""
    open_pairs = dict.fromkeys(
        ((a, x), (b, y)) for a, b in combinations(choices, 2) for x, y in product(choices[a], choices[b])
    )
    configurations = []
    while open_pairs:
        chosen = dict(next(iter(open_pairs)))
        for name in choices:
            if name not in chosen:
                chosen[name] = max(
                    choices[name], key=lambda value, name=name: _gain(open_pairs, chosen, name, value)
                )
        configuration = {name: chosen[name] for name in choices}
        for pair in combinations(configuration.items(), 2):
            open_pairs.pop(pair, None)
        configurations.append(configuration)
    return configurations


def _gain(open_pairs: Mapping[_Pair, None], chosen: Configuration, name: str, value: Any) -> int:
    """Uncovered pairs that ``value`` makes with what is chosen already."""
    new = (name, value)
    return sum(((item, new) in open_pairs) + ((new, item) in open_pairs) for item in chosen.items())
