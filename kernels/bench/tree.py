"""Times the tree operations in CUDA graphs: ``python kernels/bench/tree.py``.

A line a shape: slots, (levels, branching, nodes a slot), then microseconds of one call of each operation. A graph holds
20 calls, on shapes of Llama-3.1-8B (features of 4096, 32 layers, 8 heads of 128, pages of 16). ``grow`` is the level
before the last; ``accepted`` is no time, but nodes a slot. ``follow`` is of slots without a predicted text, ``find`` of
such as departed from one of 8192 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from specserve_kernels.ops.tree.accept import accept_path
from specserve_kernels.ops.tree.commit import advance, move_kv
from specserve_kernels.ops.tree.grow import grow_level, root_level
from specserve_kernels.ops.tree.prediction import follow_prediction
from specserve_kernels.ops.tree.select import select_tree, single_nodes
from specserve_kernels.types import Pool, Prediction, Slots, SlotTables

SHAPES = [(1, 3, 1, 4), (1, 4, 4, 16), (1, 5, 8, 32), (16, 5, 8, 32), (64, 3, 1, 4)]
PAGE, VOCAB, WIDTH, CALLS = 16, 128256, 4096, 20


def microseconds(call: Callable[[], object]) -> float:
    """Median over replays of a graph of many calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1000 / CALLS


def measure(slots: int, levels: int, k: int, nodes: int) -> dict[str, float]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    rows_B = torch.randperm(slots, device=device)
    root_B = torch.randint(VOCAB, (slots,), device=device)
    length_B = torch.randint(500, 1500, (slots,), device=device)
    pages_BM = 1 + torch.randperm(slots * 120, device=device).view(slots, 120)
    pool = Pool.of_tree(slots, levels, k, torch.float32, device)
    batch = Slots(rows_B, root_B, length_B, pages_BM[None], PAGE)
    results = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        results[name] = microseconds(call)

    root = partial(root_level, batch, pool)
    timed("root", root)
    level = root()
    for depth in range(levels):
        count = slots * level.width
        tokens = torch.rand(count, VOCAB, device=device).topk(k).indices
        logps = (-torch.rand(count, k, device=device) * 3).sort(dim=1, descending=True).values
        last = depth == levels - 1
        grow = partial(grow_level, level, tokens, logps, pool, batch)
        if depth in (levels - 2, levels - 1):
            timed("grow last" if last else "grow", grow)
        level = grow() or level
    limit_R = torch.full((slots + 1,), 9999, device=device)
    feature_RH = torch.zeros(slots + 1, WIDTH, device=device, dtype=torch.bfloat16)
    tokens_RC = torch.zeros(slots + 1, 120 * PAGE, device=device, dtype=torch.int32)
    root_R, length_R, cap_R = limit_R.clone(), limit_R.clone(), torch.full_like(limit_R, 2**62)
    tables = SlotTables(root_R, length_R, feature_RH, tokens_RC, pages_BM[None], limit_R, cap_R)

    select = partial(select_tree, pool, batch, tables, slots * nodes, 64, VOCAB)
    timed("select", select)
    timed("single", lambda: single_nodes(batch))
    tree = select()
    chosen_T = torch.zeros_like(tree.token_T)
    # Each node's last child is what the target chose: paths are long and their entries lie apart.
    tokens, parents, chosen = tree.token_T.tolist(), tree.parent_T.tolist(), chosen_T.tolist()
    for node, parent in enumerate(parents):
        if node != parent:
            chosen[parent] = tokens[node]
    chosen_T = torch.tensor(chosen, device=device)
    accept = partial(accept_path, tree, chosen_T, batch)
    timed("accept", accept)
    accepted = accept()
    results["accepted"] = float(accepted.count_B.float().mean())
    prediction = Prediction.empty(slots + 1, 8192, device)
    emitted = accepted.token_BS, accepted.count_B
    follow = partial(follow_prediction, prediction, tokens_RC, rows_B, length_B, *emitted)
    timed("follow", follow)
    prediction.length_R.fill_(8192)
    prediction.next_R.fill_(-1)
    timed("find", follow)
    features_TH = torch.randn(len(chosen), WIDTH, device=device, dtype=torch.bfloat16)
    page_feature_PH = torch.zeros(slots * 120 + 1, WIDTH, device=device, dtype=torch.bfloat16)
    counts_RV = torch.zeros(slots + 1, VOCAB, device=device, dtype=torch.int32)
    kept = features_TH, page_feature_PH, counts_RV
    timed("advance", lambda: advance(accepted, batch, tables, *kept))
    group = torch.randn(32, slots * 120 + 1, 2, PAGE, 8, 128, device=device, dtype=torch.bfloat16)
    timed("move_kv", lambda: move_kv(group, accepted, pages_BM[None]))
    return results


def main() -> None:
    for shape in SHAPES:
        slots, *rest = shape
        results = measure(*shape)
        print(f"B={slots} {tuple(rest)}:", *(f"{name} {value:.1f}" for name, value in results.items()))


if __name__ == "__main__":
    main()
