"""Ranks as processes that write to each other's memory, their kernels interpreted: sums and gathered parts."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from specserve_kernels import Parts
from specserve_kernels.ops.layer.norm import add_rms_norm
from specserve_kernels.ops.ranks import exchange
from specserve_kernels.ops.ranks.exchange import (
    Shared,
    join_parts,
    pick_rows,
    picks_rows,
    shared_bytes,
    sum_parts,
)
from torch import Tensor
from triton import language as tl

SIZES = 1, 1000, 5 * 1024, 40_000  # of one program, of several, and of programs with several pieces
PROGRAMS = 2


def mapped(count: int) -> Tensor:
    """Bytes, zero, that forked processes share."""
    return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)


def on_ranks(count: int, work: Callable[[Shared], Tensor], size: int) -> list[Tensor]:
    """What each rank returns, bytes of ``size``."""
    memory = [mapped(shared_bytes(count)) for _ in range(count)]
    host, found = mapped(24), [mapped(size) for _ in range(count)]
    addresses = torch.tensor([each.data_ptr() for each in (*memory, host)])
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            try:
                signal.alarm(60)
                torch.set_num_threads(1)  # the parent's threads are not here
                counts = torch.zeros(exchange.PROGRAMS, dtype=torch.int64)
                found[rank].copy_(work(Shared(rank, addresses, counts)).view(-1).view(torch.uint8))
                os._exit(0)
            except BaseException:
                traceback.print_exc(file=sys.stderr)
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * count
    return found


@pytest.mark.parametrize(("count", "dtype"), [(2, torch.float32), (4, torch.float32), (3, torch.float64)])
def test_sums_in_one_shot_and_in_two_have_the_order_of_ranks(count: int, dtype: torch.dtype) -> None:
    """Several after each other, as launches of graphs are."""
    parts = [
        torch.randn(count, size, generator=torch.Generator().manual_seed(size), dtype=dtype) for size in SIZES
    ]

    def work(shared: Shared) -> Tensor:
        return torch.cat(
            [
                sum_parts(each[shared.rank], shared, two_shot)
                for each in parts
                for two_shot in (False, True, False)
            ]
        )

    expected = []
    for each in parts:
        total = each[0].to(dtype)
        for part in each[1:]:
            total = total + part
        expected += [total] * 3
    with patch.object(exchange, "PROGRAMS", PROGRAMS), patch.object(exchange, "SLOT", 1 << 13):
        found = on_ranks(count, work, 3 * sum(SIZES) * dtype.itemsize)
    assert all(torch.equal(each.view(dtype), torch.cat(expected)) for each in found)


@pytest.mark.parametrize("count", [2, 3])
def test_a_norm_adds_the_parts_of_its_rows(count: int) -> None:
    """Between launches that do nothing else. Of several after each other, narrower ones and those of fewer rows leave
    nothing behind. A number that looks as if nothing had come stays what it is."""
    part_NTH, residual_TH, weight_H = torch.randn(count, 3, 300), torch.randn(3, 300), torch.randn(300)
    part_NTH[0, 1, 2] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN

    def work(shared: Shared) -> Tensor:
        totals = []
        for rows, width in ((3, 300), (1, 300), (3, 100), (1, 100), (3, 300)):
            own_TH = part_NTH[shared.rank, :rows, :width].contiguous()
            given = residual_TH[:rows, :width].contiguous(), weight_H[:width], 1e-5
            total_TH = sum_parts(own_TH, shared)
            found = add_rms_norm(Parts(own_TH, shared), *given)
            expected = add_rms_norm(total_TH, *given)
            assert all(same(*each) for each in zip(found, expected, strict=True))
            totals.append(add_rms_norm(Parts(own_TH, shared), *given)[1])
            assert same(totals[-1], found[1])
        assert shared.counts[:3].tolist() == [15, 6, 6], "or the next exchange would use the same slots"
        return totals[-1]

    total_TH = part_NTH[0]
    for part_TH in part_NTH[1:]:
        total_TH = total_TH + part_TH
    found = on_ranks(count, work, 3600)
    assert all(same(each.view(torch.float32), (total_TH + residual_TH).flatten()) for each in found)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("unit", [1, 8])
def test_columns_are_joined_and_rows_picked(unit: int) -> None:
    """Of a table that ranks cut unevenly. No rank has a row for the last token."""
    table_VH, tokens_T = torch.randn(45, 70).to(torch.bfloat16), torch.tensor([44, 0, 17, 16, 8, 7, 33, 45])
    whole = torch.randint(100, (60, 45), dtype=torch.int32)
    limits = [45 // unit * rank // 3 * unit for rank in range(3)] + [45]

    def work(shared: Shared) -> Tensor:
        begin, end = limits[shared.rank : shared.rank + 2]
        own_RH = table_VH[begin:end]
        assert picks_rows(tokens_T, own_RH)
        place_T, found_TH = pick_rows(tokens_T, own_RH, begin, shared)
        assert place_T.tolist() == list(range(8))
        assert torch.equal(found_TH[:-1], table_VH[tokens_T[:-1]])
        assert not found_TH[-1].any()
        return join_parts(whole[:, begin:end].contiguous(), 45, unit, shared)

    with patch.object(exchange, "PROGRAMS", 8), patch.multiple(exchange, FEW=16, SLOT=1 << 8):
        found = on_ranks(3, work, whole.nbytes)
    assert all(torch.equal(each.view(whole.dtype), whole.flatten()) for each in found)


def norm_of(part_TH: Tensor, shared: Shared) -> object:
    return add_rms_norm(Parts(part_TH, shared), part_TH, part_TH[0], 1e-5)


@pytest.mark.parametrize("launch", [sum_parts, norm_of])
@pytest.mark.parametrize("stop", [True, False])
def test_a_wait_ends_when_the_host_says_so_or_has_counted_enough(
    stop: bool, launch: Callable[[Tensor, Shared], object]
) -> None:
    """The other rank launches nothing."""
    memory, host = [mapped(shared_bytes(2)) for _ in range(2)], mapped(24).view(torch.int64)
    host[0], host[2] = stop, 5
    addresses = torch.tensor([each.data_ptr() for each in (*memory, host)])
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(0.01):
            host[1] += 1

    timer = threading.Thread(target=count)
    timer.start()
    with patch.object(exchange, "LOOK", tl.constexpr(16)):
        launch(torch.ones(1, 8), Shared(0, addresses, torch.zeros(exchange.PROGRAMS, dtype=torch.int64)))
    ended.set()
    timer.join()
    assert host[0] == (1 if stop else 2)
    assert stop or host[1] > 5
