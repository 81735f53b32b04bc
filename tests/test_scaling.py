"""The simulator of many replicas: times of a few requests by hand, and what two routers choose."""

from __future__ import annotations

from benchmarks.scaling import CELL, Costs, Request, by_cell, by_prefix, expected, simulate

COSTS = Costs([(1, 10.0), (2, 12.0), (4, 20.0)], prompt=1.0, launch=5.0)


def one(requests: list[Request]) -> list[Request]:
    return simulate(COSTS, ["only"], requests, lambda _: None, by_prefix)


def test_costs_between_measured_numbers() -> None:
    assert [COSTS.at(n) for n in (1, 2, 3, 4)] == [10, 12, 16, 20]


def test_a_request_alone() -> None:
    (done,) = one([Request("a", 3, 4, 5, at=100)])
    assert (done.first, done.end) == (100 + 5 + 7, 100 + 12 + 4 * 10)


def test_an_arrival_waits_for_the_step_and_is_waited_for() -> None:
    early, late = Request("a", 3, 4, 5), Request("a", 3, 2, 2, at=20)
    assert one([early, late]) == [late, early]
    assert late.cached
    # The first has its token at 12 and a step until 22; then 2 prompt tokens, a step of both, and two alone.
    assert (late.first, late.end) == (22 + 7, 29 + 12)
    assert early.end == 41 + 2 * 10


def test_no_more_run_than_were_measured() -> None:
    """Four begin and have both tokens at 25; the fifth begins then."""
    first, *_, last = one([Request(str(n), 0, 0, 2) for n in range(5)])
    assert (first.end, last.end) == (25, 25 + 5 + 10)


def test_clients_take_turns_on_the_replicas_of_their_prefixes() -> None:
    names = ["left", "right"]
    homes = {by_prefix(str(n), dict.fromkeys(names, 0)): str(n) for n in range(8)}
    clients = [[Request(homes[name], 0, 0, 2) for _ in range(3)] for name in names]
    done = expected(COSTS, names, clients)
    assert [each.end for each in done] == [15, 15, 30, 30, 45, 45]


def test_a_cell_and_a_replica_in_it_are_chosen_by_prefix() -> None:
    names = [f"replica {n}" for n in range(2 * CELL)]
    loads, route = dict.fromkeys(names, 0), by_cell(names)
    chosen = {str(n): route(str(n), loads) for n in range(50)}
    assert {names.index(name) // CELL for name in chosen.values()} == {0, 1}
    assert chosen == {prefix: route(prefix, loads) for prefix in chosen}
    busy = loads | {chosen["0"]: 400}
    assert route("0", busy) != chosen["0"]
