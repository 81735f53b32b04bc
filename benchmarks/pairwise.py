"""Choose few configurations that cover every pair of choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Configuration = dict[str, Any]
_Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(choices: Mapping[str, Sequence[Any]]) -> list[Configuration]:
    """Greedy: each configuration takes the first of the still uncovered pairs and then, name by name, the value
    that covers most of those left. Deterministic."""
    open_pairs = dict.fromkeys(
        ((a, x), (b, y)) for a, b in combinations(choices, 2) for x, y in product(choices[a], choices[b])
    )
    found = []
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
        found.append(configuration)
    return found


def _gain(open_pairs: Mapping[_Pair, None], chosen: Configuration, name: str, value: Any) -> int:
    """Uncovered pairs that ``value`` makes with what is chosen already."""
    new = (name, value)
    return sum(((item, new) in open_pairs) + ((new, item) in open_pairs) for item in chosen.items())
