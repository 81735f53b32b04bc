"""The tree operations' kernels against their references: on a CPU under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from specserve_kernels.reference.tree import accept as accept_reference
from specserve_kernels.reference.tree import commit as commit_reference
from specserve_kernels.reference.tree import deferred as deferred_reference
from specserve_kernels.reference.tree import gather_slots as gather_reference
from specserve_kernels.reference.tree import grow as grow_reference
from specserve_kernels.reference.tree import select as select_reference
from specserve_kernels.types import Accepted, Level, Pool, Slots, SlotTables, Tree
from torch import Tensor

pytest.importorskip("triton")
from specserve_kernels.ops.tree import accept, commit, deferred, grow, select
from specserve_kernels.ops.tree import gather_slots as gather

VOCAB, NEVER = 40, -torch.inf


def assert_same(actual: object, expected: object, but: tuple[str, ...] = ()) -> None:
    """All tensors of a dataclass equal, and of the same type."""
    for field in dataclasses.fields(expected):  # type: ignore[arg-type]
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if field.name in but:
            continue
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype, field.name
            assert one.shape == other.shape, field.name
            assert torch.equal(one, other), (field.name, one, other)
        else:
            assert one == other, field.name


def assert_same_tree(actual: Tree, expected: Tree, slots: int, hole: int, rows_B: Tensor) -> None:
    """Of what is left over only what must hold."""
    spare = expected.slot_T == slots
    for field in dataclasses.fields(expected):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if field.name in ("q_start", "slot_T", "local_T", "place_T"):
            assert torch.equal(one, other), (field.name, one, other)
        elif isinstance(other, Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), field.name
            assert torch.equal(one[~spare], other[~spare]), (field.name, one, other)
    assert actual.is_chain == expected.is_chain
    assert torch.isin(actual.rows_T[spare], rows_B).all()
    assert ((actual.parent_T[spare] >= 0) & (actual.parent_T[spare] < len(spare))).all()
    assert ((actual.token_T[spare] >= 0) & (actual.token_T[spare] < hole)).all()
    assert (actual.position_T[spare] >= 0).all()
    assert (actual.depth_T[spare] == 0).all()
    assert (actual.mask_T[spare] == 1).all()
    assert (actual.path_TA[spare] == hole).all()


@dataclasses.dataclass
class Batch:
    """Slots on distinct pages; ``rows_B`` of a larger state, padding on its last row."""

    slots: Slots
    state_rows: int

    @property
    def rows_B(self) -> Tensor:
        return self.slots.rows_B

    @property
    def length_B(self) -> Tensor:
        return self.slots.length_B

    @property
    def pages_BM(self) -> Tensor:
        return self.slots.pages_BM

    @classmethod
    def random(cls, slots: int, page_size: int, device: str, ahead: int, padding: int = 0) -> Batch:
        state_rows = slots + 3
        rows = torch.randperm(state_rows - 1)[:slots]
        length = torch.randint(1, 3 * page_size + 2, (slots,))
        if padding:
            rows[-padding:], length[-padding:] = state_rows - 1, 1
        columns = (int(length.max()) + ahead) // page_size + 2
        pages = 1 + torch.randperm(slots * columns).view(slots, columns)
        root = torch.randint(VOCAB, (slots,))
        return cls(Slots(*(x.to(device) for x in (rows, root, length, pages[None])), page_size), state_rows)


def candidates(nodes: int, k: int, device: str, ties: bool, dead: bool) -> tuple[Tensor, Tensor]:
    """Each node's K candidates, best first, of different tokens."""
    token_NC = torch.stack([torch.randperm(VOCAB)[:k] for _ in range(nodes)])
    logp_NC = -torch.randint(0, 3, (nodes, k)).float() if ties else -torch.rand(nodes, k) * 3
    if dead:
        logp_NC[torch.rand(nodes, k) < 0.2] = NEVER
    return token_NC.to(device), logp_NC.sort(dim=1, descending=True).values.to(device)


def draft_both(
    batch: Batch, k: int, levels: int, device: str, ties: bool = False, dead: bool = False
) -> Pool:
    """All levels by both versions, compared; returns the pool."""
    slots = len(batch.rows_B)
    pools = [Pool.of_tree(slots, levels, k, torch.float32, torch.device(device)) for _ in range(2)]
    expected: Level | None = grow_reference.root_level(batch.slots, pools[0])
    actual: Level | None = grow.root_level(batch.slots, pools[1])
    assert expected is not None
    assert actual is not None
    assert_same(actual, expected)
    for _ in range(levels):
        assert expected is not None
        assert actual is not None
        tokens, logps = candidates(slots * expected.width, k, device, ties, dead)
        expected = grow_reference.grow_level(expected, tokens, logps, pools[0], batch.slots)
        actual = grow.grow_level(actual, tokens, logps, pools[1], batch.slots)
        if expected is not None:
            assert_same(actual, expected)
            # Chains: the launch after this one may read rows before this one has ended.
            assert k > 1 or (actual is not None and actual.rows_N is batch.slots.rows_B)
    assert actual is None
    assert_same(pools[1], pools[0])
    return pools[1]


def select_both(
    batch: Batch, pool: Pool, tables: SlotTables, total: int, max_nodes: int
) -> tuple[Tree, Tree]:
    args = pool, batch.slots, tables, total, max_nodes, VOCAB
    expected = select_reference.select_tree(*args)
    actual = select.select_tree(*args)
    assert_same_tree(actual, expected, len(batch.rows_B), VOCAB, batch.rows_B)
    return actual, expected


def tables_of(batch: Batch, device: str, width: int = 1) -> SlotTables:
    """State tables that hold the batch's lengths, with features of ``width`` numbers."""
    rows, columns = batch.state_rows, int(batch.length_B.max()) + 80
    root_R, length_R, limit_R, cap_R = torch.arange(rows, device=device).repeat(4, 1).unbind()
    length_R[batch.rows_B] = batch.length_B
    tokens_RC = torch.randint(VOCAB, (rows, columns), device=device, dtype=torch.int32)
    feature_RH = torch.randn(rows, width, device=device)
    return SlotTables(root_R, length_R, feature_RH, tokens_RC, batch.pages_BM[None], limit_R, cap_R)


def limits(batch: Batch, rooms: list[int], caps: list[int], device: str) -> SlotTables:
    """State tables in which each row of the batch has one of these rooms and caps."""
    tables = tables_of(batch, device)
    tables.limit[batch.rows_B] = batch.length_B + 2 + torch.tensor(rooms, device=device)
    tables.draft_cap[batch.rows_B] = torch.tensor(caps, device=device)
    return tables


SHAPES = [(1, 1), (1, 3), (1, 6), (2, 1), (2, 3), (4, 2), (4, 4), (3, 3), (8, 2), (8, 3)]


@pytest.mark.parametrize(("k", "levels"), SHAPES)
def test_draft_levels(k: int, levels: int, device: str) -> None:
    torch.manual_seed(k * 10 + levels)
    for slots, page_size, ties, dead in ((1, 1, False, False), (3, 16, True, True), (2, 64, True, False)):
        batch = Batch.random(slots, page_size, device, ahead=1 + levels * k)
        draft_both(batch, k, levels, device, ties, dead)


def test_a_wide_level(device: str) -> None:
    """32 * 32 candidates a slot, with ties: the rank by repeated maxima."""
    torch.manual_seed(0)
    batch = Batch.random(2, 16, device, ahead=70)
    draft_both(batch, 32, 2, device, ties=True, dead=True)
    draft_both(batch, 20, 3, device)


def test_scores_of_both_zeros_are_equal(device: str) -> None:
    batch = Batch.random(1, 16, device, ahead=70)
    for k in (4, 20):
        pool = Pool.of_tree(1, 2, k, torch.float32, torch.device(device))
        level = grow.root_level(batch.slots, pool)
        level = dataclasses.replace(level, score_BW=-torch.zeros_like(level.score_BW))
        tokens = torch.arange(k, device=device)[None]
        logps = torch.zeros(1, k, device=device)
        logps[0, ::2] = -0.0
        actual = grow.grow_level(level, tokens, logps, pool, batch.slots)
        assert actual is not None
        pool.scores_BP[:, k:] = NEVER
        assert actual.token_N.tolist() == list(range(k))
        tables = limits(batch, [9], [99], device)
        tree, _ = select_both(batch, pool, tables, 1 + k // 2, 64)
        assert tree.token_T[1:].tolist() == list(range(k // 2))


@pytest.mark.parametrize(("k", "levels"), [*SHAPES, (1, 63)])
def test_select(k: int, levels: int, device: str) -> None:
    rng = random.Random(k * 10 + levels)
    torch.manual_seed(k * 10 + levels)
    for ties, dead in ((True, False), (False, True)):
        slots = rng.choice([1, 2, 5])
        batch = Batch.random(slots, rng.choice([1, 16, 64]), device, ahead=70)
        pool = draft_both(batch, k, min(levels, 6), device, ties=ties, dead=dead)
        if levels > 6:  # deep chains: the pool alone
            pool = chain_pool(slots, levels, device)
        size = pool.scores_BP.shape[1]
        rooms = [rng.choice([-3, 0, 1, 2, 99, 99]) for _ in range(slots)]
        caps = [rng.choice([0, 1, 3, 2**62, 2**62]) for _ in range(slots)]
        for each_rooms, each_caps in (([99] * slots, [2**62] * slots), (rooms, caps)):
            tables = limits(batch, each_rooms, each_caps, device)
            everything = slots * (1 + min(size, 63))
            some = [slots, slots + 1, slots + size // 2, everything - 1, everything, everything + 70]
            for total in rng.sample(some, 2):
                max_nodes = rng.choice([2, 8, 64, 64])
                select_both(batch, pool, tables, total, max_nodes)


def chain_pool(slots: int, levels: int, device: str) -> Pool:
    tokens = torch.randint(VOCAB, (slots, levels), device=device)
    return Pool.of_text(tokens, -torch.rand(slots, levels, device=device).cumsum(1))


def test_a_batch_of_many_slots(device: str) -> None:
    """More keys than a block holds, in a budget that cuts among equals."""
    torch.manual_seed(5)
    slots = 17 if device == "cpu" else 200
    batch = Batch.random(slots, 16, device, ahead=70)
    pool = draft_both(batch, 8, 2, device, ties=True)
    tables = limits(batch, [99] * slots, [2**62] * slots, device)
    for total in (slots + 7, slots * 9, slots * 40):
        select_both(batch, pool, tables, total, 64)


def test_trees_of_64_nodes(device: str) -> None:
    """Bit 63 of the masks, in chains and in trees, and the walk through it."""
    torch.manual_seed(6)
    for k, levels in ((1, 63), (8, 3)):
        batch = Batch.random(2, 16, device, ahead=70)
        pool = chain_pool(2, 63, device) if k == 1 else draft_both(batch, k, levels, device)
        tables = limits(batch, [99] * 2, [2**62] * 2, device)
        tree, expected = select_both(batch, pool, tables, 128, 64)
        assert tree.q_start.tolist() == [0, 64, 128]
        assert (tree.mask_T < 0).any()
        accept_both(batch, tree, expected, chosen_tokens(tree, 1.0))


def chosen_tokens(tree: Tree, agree: float) -> Tensor:
    """After each node, mostly the token of one of its children."""
    chosen_T = torch.randint(VOCAB, tree.token_T.shape).tolist()
    tokens = tree.token_T.tolist()
    for node, (parent, local) in enumerate(zip(tree.parent_T.tolist(), tree.local_T.tolist(), strict=True)):
        if local and random.random() < agree:
            chosen_T[parent] = tokens[node]
    return torch.tensor(chosen_T, device=tree.token_T.device)


def first_choices(tree: Tree, chosen_T: Tensor) -> list[int]:
    """How far the target follows the first child of each node, by slot."""
    token, parent, chosen, bounds = (
        t.tolist() for t in (tree.token_T, tree.parent_T, chosen_T, tree.q_start)
    )
    found = []
    for start, end in itertools.pairwise(bounds):
        node, steps = start, 0
        while (
            child := parent.index(node, node + 1, end) if node in parent[node + 1 : end] else None
        ) is not None:
            if token[child] != chosen[node]:
                break
            node, steps = child, steps + 1
        found.append(steps)
    return found


def accept_both(batch: Batch, tree: Tree, expected_tree: Tree, chosen_T: Tensor) -> Accepted:
    expected = accept_reference.accept_path(expected_tree, chosen_T, batch.slots)
    actual = accept.accept_path(tree, chosen_T, batch.slots)
    live_BS = expected.token_BS >= 0
    assert expected.packed_BX[:, -1].tolist() == first_choices(expected_tree, chosen_T)
    agreeing = expected_tree.token_T.new_full(chosen_T.shape, -1)
    for node, above in reversed(
        list(enumerate(expected_tree.parent_T.tolist()))
    ):  # first children last: they stay
        if above != node:
            agreeing[above] = expected_tree.token_T[node]
    assert expected.packed_BX[:, -2].tolist() == first_choices(expected_tree, agreeing)
    for field in dataclasses.fields(expected):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        assert (one.dtype, one.shape) == (other.dtype, other.shape), field.name
        if field.name in ("path_BS", "count_B", "packed_BX", "next_token_BS") or "place" in field.name:
            assert torch.equal(one, other), (field.name, one, other)
        else:
            assert torch.equal(one[live_BS], other[live_BS]), (field.name, one, other)
    return actual


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_single_nodes(page_size: int, device: str) -> None:
    torch.manual_seed(page_size)
    for slots in (1, 3, 130):
        batch = Batch.random(slots, page_size, device, ahead=3)
        actual, expected = select.single_nodes(batch.slots), select_reference.single_nodes(batch.slots)
        assert_same(actual, expected)
        if slots < 10:
            accept_both(batch, actual, expected, torch.randint(VOCAB, (slots,), device=device))


@pytest.mark.parametrize(
    ("k", "levels", "page_size"), [(1, 1, 16), (1, 5, 1), (4, 4, 1), (4, 4, 16), (2, 6, 16), (8, 2, 1)]
)
def test_whole_steps(k: int, levels: int, page_size: int, device: str) -> None:
    """Draft, select, accept, commit: caches and state end the same."""
    torch.manual_seed(levels)
    random.seed(levels)
    for trial in range(3):
        slots, padding = (1, 4, 5)[trial], (0, 0, 2)[trial]
        batch = Batch.random(slots, page_size, device, ahead=70, padding=padding)
        pool = draft_both(batch, k, levels, device)
        tables = limits(batch, [99] * slots, [2**62] * slots, device)
        total = slots * (1 + min(k * levels, 20))
        tree, expected_tree = select_both(batch, pool, tables, total, 64)
        accepted = accept_both(batch, tree, expected_tree, chosen_tokens(tree, 0.9))
        pages = int(batch.pages_BM.max()) + 1
        group = torch.randn(3, pages, 2, page_size, 2, 24, device=device).to(torch.bfloat16)
        groups = group.clone(), group.clone()
        commit_reference.move_kv(groups[0], accepted, batch.slots.pages_GBM)
        commit.move_kv(groups[1], accepted, batch.slots.pages_GBM)
        assert torch.equal(groups[0][:, 1:], groups[1][:, 1:])
        assert trial == 0 or k == 1 or not torch.equal(groups[1], group)
        check_advance(batch, accepted, total, pages, device, penalized=trial > 0, featured=trial < 2)


def check_advance(
    batch: Batch, accepted: Accepted, total: int, pages: int, device: str, penalized: bool, featured: bool
) -> None:
    width = 2100
    features_TH = torch.randn(total, width, device=device) if featured else None
    tables = tables_of(batch, device, width)
    page_feature_PH = torch.randn(pages, width, device=device)
    counts_RV = torch.randint(5, (batch.state_rows, VOCAB), device=device, dtype=torch.int32)
    before = copy_of(tables)
    expected, actual = (
        [copy_of(tables), features_TH, page_feature_PH.clone(), counts_RV.clone() if penalized else None]
        for _ in range(2)
    )
    commit_reference.advance(accepted, batch.slots, *expected)  # type: ignore[arg-type]
    commit.advance(accepted, batch.slots, *actual)  # type: ignore[arg-type]
    # Of padding's row only the length counts, of page 0 nothing.
    for name in ("root", "feature", "tokens"):
        one, other = (getattr(each[0], name)[:-1] for each in (actual, expected))
        assert torch.equal(one, other), name
        assert torch.equal(one, getattr(before, name)[:-1]) == (name == "feature" and not featured)
    assert torch.equal(actual[0].length, expected[0].length)  # type: ignore[union-attr]
    assert torch.equal(actual[2][1:], expected[2][1:])  # type: ignore[index]
    if penalized:
        assert torch.equal(actual[3][:-1], expected[3][:-1])  # type: ignore[index]
        assert not torch.equal(actual[3], counts_RV)  # type: ignore[arg-type]


def copy_of(tables: SlotTables) -> SlotTables:
    return SlotTables(*(getattr(tables, field.name).clone() for field in dataclasses.fields(tables)))


@pytest.mark.parametrize(("size", "states", "page_size"), [(24, 1, 1), (1030, 3, 4)], ids=["one", "at taps"])
def test_states_that_are_left(size: int, states: int, page_size: int, device: str) -> None:
    """As many as a slot may leave of one, fewer of the others, none of padding."""
    torch.manual_seed(size)
    batch, most = Batch.random(4, page_size, device, ahead=70, padding=2), 5
    text_RC = torch.randint(VOCAB, (batch.state_rows, 99), dtype=torch.int32, device=device)
    kept_RDX = torch.zeros(batch.state_rows, most, states * size, device=device)
    left_R = torch.zeros(batch.state_rows, dtype=torch.int64, device=device)
    tables = [(kept_RDX.clone(), left_R.clone()) for _ in range(2)]
    for steps in (most, 2):
        for step in range(steps):
            some = [slice(None), slice(1, None)][step % 2]
            rows_B, root_B, length_B = (x[some] for x in (batch.rows_B, batch.slots.root_B, batch.length_B))
            slots = Slots(rows_B, root_B, length_B, batch.slots.pages_GBM[:, some], page_size)
            kept = [torch.randn(len(rows_B), size, device=device) for _ in range(states)]
            deferred_reference.keep_states(slots, kept, *tables[0])
            deferred.keep_states(slots, kept, *tables[1])
            length_B += rows_B < batch.state_rows - 1
        assert torch.equal(tables[1][1], tables[0][1])
        assert tables[1][1][batch.rows_B].tolist() == [-(-steps // 2), steps, 0, 0]
        expected = deferred_reference.take_states(batch.slots, *tables[0], text_RC)
        actual = deferred.take_states(batch.slots, *tables[1], text_RC)
        for name, one, other in zip(expected._fields, actual, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert torch.equal(one[: -2 * most], other[: -2 * most]), name
            assert torch.equal(one, other) or name == "states_NX", name
        assert (expected.last_row_N < batch.state_rows - 1).sum() == 2
        assert not tables[0][1].any()
        assert not tables[1][1].any()


@pytest.mark.parametrize("pages", [1, 3, 1500])
def test_gathered_slots(pages: int, device: str) -> None:
    torch.manual_seed(pages)
    root_R, length_R = torch.randint(9999, (2, 7), device=device).unbind()
    for rows, tables in (([6], 1), ([5, 0, 2, 6, 6], 3)):
        pages_GRM = torch.randint(9999, (tables, 7, pages), device=device)
        given = torch.tensor(rows, device=device), root_R, length_R, pages_GRM
        found = zip(gather.gather_slots(*given), gather_reference.gather_slots(*given), strict=True)
        for one, other in found:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.is_contiguous()
            assert torch.equal(one, other)


def test_moves_whose_targets_are_sources(device: str) -> None:
    """A path shifts by one: every target but the first is the next one's source."""
    torch.manual_seed(7)
    for slots, columns, heads, dim, dtype in ((2, 7, 8, 128, torch.bfloat16), (1, 63, 2, 40, torch.float32)):
        batch = Batch.random(slots, 16, device, ahead=70)
        zero = torch.zeros(slots, columns, dtype=torch.int64, device=device)
        first = torch.arange(slots, device=device) * batch.slots.capacity
        place = (first + batch.length_B)[:, None] + torch.arange(columns, device=device)
        accepted = Accepted(*(zero, zero[:, 0], zero), *(place, place + 1), *(zero, zero, zero))
        pages = int(batch.pages_BM.max())
        pages_GBM = torch.stack([batch.pages_BM, batch.pages_BM + pages])
        group = torch.randn(2, 2 * pages + 1, 2, 16, heads, dim, device=device).to(dtype)
        expected = group.clone()
        commit_reference.move_kv(expected, accepted, pages_GBM)
        commit.move_kv(group, accepted, pages_GBM)
        assert torch.equal(group[:, 1:], expected[:, 1:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities of both signs
@pytest.mark.parametrize("k", [1, 4, 20])
def test_scores_that_are_not_finite(k: int, device: str) -> None:
    """Every node of a next level is written, with different candidates, whatever their scores: NaN counts as -inf."""
    torch.manual_seed(k)
    batch = Batch.random(3, 16, device, ahead=70)
    slots = 3
    pools = [Pool.of_tree(slots, 3, k, torch.float32, torch.device(device)) for _ in range(2)]
    expected = grow_reference.root_level(batch.slots, pools[0])
    actual = grow.root_level(batch.slots, pools[1])
    for depth, bad in enumerate([(NEVER, torch.nan, -torch.nan), (torch.nan, torch.inf, NEVER)]):
        tokens, logps = candidates(slots * expected.width, k, device, ties=True, dead=True)
        logps[0] = torch.nan
        logps[-1] = -torch.inf
        for i, value in enumerate(bad[: len(logps)]):
            logps[i, (i + depth) % k] = value
        grown = grow.grow_level(actual, tokens, logps, pools[1], batch.slots)
        assert grown is not None
        clean = torch.where(logps.isnan(), NEVER, logps)
        if depth == 0:  # no infinities of both signs meet
            right = grow_reference.grow_level(expected, tokens, clean, pools[0], batch.slots)
            assert right is not None
            assert_same(grown, right)
            expected = right
        assert not grown.score_BW.isnan().any()
        slot = torch.arange(slots, device=device).repeat_interleave(k)
        assert torch.equal(grown.place_N // batch.slots.capacity, slot)
        own = grown.pool_BW.sort(1).values
        assert ((own >= depth * k) & (own < k + depth * k * k)).all()
        assert (own.diff(dim=1) > 0).all()
        assert (grown.source_N // actual.width == torch.arange(slots * k, device=device) // k).all()
        actual = grown
    assert not pools[1].scores_BP[:, : k + k * k].isnan().any()
