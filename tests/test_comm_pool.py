"""`ranks.py` itself: what a test sees of ranks that raise, hang or die, and that the next test is not harmed."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks, run_world


def _numbers(group, offset):
    return dist.get_rank(), dist.get_rank(group), os.getpid(), torch.full((2,), offset + dist.get_rank(group))


def test_results_come_in_rank_order_from_processes_of_their_own():
    results = run_ranks(_numbers, 2, 5, members=(1, 3), timeout=60)
    assert [result[:2] for result in results] == [(1, 0), (3, 1)]
    assert [result[3].tolist() for result in results] == [[5, 5], [6, 6]]
    assert len({os.getpid(), *(result[2] for result in results)}) == 3
    assert [result[0] for result in run_world(_numbers, 0, timeout=30)] == [0, 1, 2, 3]


def _raises_on_1(group):
    if dist.get_rank() == 1:
        raise ValueError("of rank 1 alone")


def _returns_what_cannot_travel(group):
    return lambda: None


def test_an_exception_shows_its_rank_and_its_traceback_and_costs_no_pool():
    before = [result[2] for result in run_world(_numbers, 0, timeout=30)]
    with pytest.raises(RankFailure) as caught:
        run_ranks(_raises_on_1, 3, timeout=30)
    text = str(caught.value)
    assert text.startswith("--- rank 1\n")
    assert "in _raises_on_1" in text
    assert "ValueError: of rank 1 alone" in text
    assert "rank 0" not in text
    with pytest.raises(RankFailure, match="_returns_what_cannot_travel"):
        run_ranks(_returns_what_cannot_travel, 1, timeout=30)
    assert [result[2] for result in run_world(_numbers, 0, timeout=30)] == before


def _everything_at_once(group):
    rank = dist.get_rank()
    if rank == 0:
        _sleeps()
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    if rank == 2:
        os._exit(3)
    raise ValueError("of rank 3")


def _sleeps():
    time.sleep(600)


def test_a_hang_ends_within_its_timeout_with_every_ranks_traceback():
    """One rank sleeps, one waits for it, one is gone, one raises; and the next test has a whole pool again."""
    run_world(_numbers, 0, timeout=60)
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_world(_everything_at_once, timeout=3)
    assert time.monotonic() - started < 15
    text = str(caught.value)
    assert "rank 0 did not return; it was at" in text
    assert "in _sleeps" in text
    assert "rank 1 did not return; it was at" in text
    assert "in recv" in text
    assert "--- rank 2\nthe process ended with exit code 3" in text
    assert "ValueError: of rank 3" in text
    assert [result[0] for result in run_world(_numbers, 0, timeout=60)] == [0, 1, 2, 3]
