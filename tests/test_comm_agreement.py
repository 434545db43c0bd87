"""`Call`: the ranks compare what they are about to do, fail together, wait for nobody for ever, and then go on."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_comm_transports import KINDS, on_members, on_ranks

from halotile.comm import Call, Counters, Ranks, VirtualGroup, fetch_rows, run_virtual
from halotile.comm.virtual import MemoryBoard
from halotile.errors import MismatchError, MissingRankError, PlanError, RemoteRankError
from halotile.geometry import Extents, Interval

PROMPT_S = 5.0
"""Far more than a message takes on a busy machine, far less than the timeout of 20 s that is not to be waited for."""


def outcome_of(work):
    """("ok", result) or (type name, text) of what `work()` raised, and the seconds that it took."""
    started = time.monotonic()
    try:
        result = ("ok", work())
    except (Exception, KeyboardInterrupt) as error:
        result = (type(error).__name__, str(error))
    return result, time.monotonic() - started


def one_call(ranks, act, label=0, facts=None):
    """A whole call with an exchange in the middle, failing where `act` says; returns what the exchange brought."""
    with Call(ranks) as call:
        if act == "before":
            raise ValueError(f"before {ranks.rank} in {label}")
        call.meet(facts or {"label": str(label)})
        with call.together("work"):
            if act == "work":
                raise ZeroDivisionError(f"work {ranks.rank} in {label}")
            call.piece_done()
        local = torch.tensor([[100 * label + ranks.rank]])
        got = fetch_rows(local, 0, Extents((1,) * ranks.size), [Interval(0, ranks.size)] * ranks.size, ranks)
        with call.together("end"):
            if act == "end":
                raise RuntimeError(f"end {ranks.rank} in {label}")
        return got.flatten().tolist()


def right(ranks, label):
    """What a call that went well brings."""
    return [100 * label + rank for rank in range(ranks)]


# --- meeting


def _meet_with(ranks, facts):
    result, seconds = outcome_of(lambda: one_call(ranks, "go", 1, facts[ranks.rank]))
    assert seconds < PROMPT_S
    # all know, so nobody need be told
    assert ranks.transport.board.get(f"{ranks.transport.calls - 1}/failed") is None
    # R7: and the next call is right
    return *result, one_call(ranks, "go", 2)


HEIGHTS = [{"shape": "(1, 4, 8, 8)", "dtype": "f32"}, {"shape": "(1, 4, 9, 8)", "dtype": "f32"}]
DTYPES = [{"shape": "(1,)", "dtype": "f32"}, {"shape": "(1,)", "dtype": "bf16"}]
PLANS = [{"plan": "aa"}, {"plan": "bb"}, {"plan": "aa"}]
ABSENT = [{"half": "decode", "strategy": "tile"}, {"half": "decode"}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("facts", "said", "unsaid"),
    [
        (HEIGHTS, "shape: rank 0 has (1, 4, 8, 8), rank 1 has (1, 4, 9, 8)", "dtype"),
        (DTYPES, "dtype: rank 0 has f32, rank 1 has bf16", "shape"),
        (PLANS, "plan: rank 0 has aa, rank 1 has bb, rank 2 has aa", "dtype"),
        (ABSENT, "strategy: rank 0 has tile, rank 1 has nothing", "half"),
    ],
)
def test_ranks_that_disagree_all_hear_who_has_what(kind, facts, said, unsaid):
    """R7."""
    for name, text, after in on_ranks(kind, len(facts), _meet_with, facts):
        assert name == "MismatchError"
        assert said in text
        assert unsaid not in text
        assert after == right(len(facts), 2)


def _counted(ranks):
    before = ranks.counters.snapshot()
    with Call(ranks) as call:
        call.meet({"a": "b"})
        with call.together("work"):
            pass
        with call.together("end"):
            pass
    return ranks.counters.since(before)


@pytest.mark.parametrize("kind", KINDS)
def test_agreements_are_counted_and_send_nothing(kind):
    assert on_ranks(kind, 2, _counted) == [Counters(0, 0, 3)] * 2


# --- who does not come


def _only_rank_0_calls(ranks):
    alone = None
    if ranks.rank == 0:
        alone = outcome_of(lambda: one_call(ranks, "go", 1))
        # the others come to that call when it is long given up
        ranks.transport.board.set("late", b"now")
    else:
        while ranks.transport.board.get("late") is None:
            time.sleep(0.01)
        alone = outcome_of(lambda: one_call(ranks, "go", 1))
    return alone, one_call(ranks, "go", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_only_one_rank_makes_is_given_up(kind):
    """H1: within the timeout, naming who is missing; the late ones hear of it at once, and all go on in step."""
    results = on_ranks(kind, 3, _only_rank_0_calls, timeout_s=0.5)
    (name, text), seconds = results[0][0]
    assert name == "MissingRankError"
    assert "rank 0 waited 0.5 s in call" in text
    assert "for ranks 1 (global rank 1), 2 (global rank 2), which did not make this call" in text
    assert 0.45 < seconds < PROMPT_S
    for (late_name, late_text), late_seconds in [result[0] for result in results[1:]]:
        assert (late_name, late_text) == ("MissingRankError", text)
        assert late_seconds < 0.45
    assert [result[1] for result in results] == [right(3, 2)] * 3


def test_the_missing_are_named_by_both_of_their_numbers():
    """H1, R3: rank 1 of group (1, 3) is global rank 3."""
    (result, _), after = on_members((1, 3), _only_rank_0_calls, timeout_s=0.5)[0]
    assert "for ranks 1 (global rank 3), which did not make this call" in result[1]
    assert after == right(2, 2)


def _rank_1_left_one_out(ranks):
    """Rank 0 makes two calls and rank 1 only the second, while rank 0 still waits in the first."""
    first = outcome_of(lambda: one_call(ranks, "go", 1 if ranks.rank == 0 else 2))[0]
    return first, outcome_of(lambda: one_call(ranks, "go", 2))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_left_a_call_out_meets_the_others_in_theirs(kind):
    for (name, text), after in on_ranks(kind, 2, _rank_1_left_one_out):
        assert name == "MismatchError"
        assert "label: rank 0 has 1, rank 1 has 2" in text
        assert after == ("ok", right(2, 2))


def _stops_half_way(ranks, silent):
    """Rank 1 works for longer than the timeout, in pieces that it reports, or in silence."""

    def work():
        with Call(ranks) as call:
            call.meet({})
            with call.together("work"):
                for _ in range(8 if ranks.rank == 1 else 1):
                    if ranks.rank == 1:
                        time.sleep(0.125)
                    if not silent:
                        call.piece_done()

    result, seconds = outcome_of(work)
    return *result, seconds, one_call(ranks, "go", 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_rank_that_finishes_pieces_is_waited_for(kind):
    for name, _, seconds, after in on_ranks(kind, 2, _stops_half_way, False, timeout_s=0.5):
        assert name == "ok"
        assert seconds > 0.9
        assert after == right(2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_works_in_silence_is_given_up(kind):
    results = on_ranks(kind, 2, _stops_half_way, True, timeout_s=0.5)
    assert results[0][0] == "MissingRankError"
    assert "for ranks 1 (global rank 1), which did not finish the phase 'work'" in results[0][1]
    assert 0.45 < results[0][2] < 0.95
    # and learns of it when it is done
    assert results[1][:2] == results[0][:2]
    assert [after for *_, after in results] == [right(2, 3)] * 2


# --- failing together


def _fails_at(ranks, where, who):
    first, seconds = outcome_of(lambda: one_call(ranks, where if ranks.rank in who else "go", 1))
    return *first, seconds, one_call(ranks, "go", 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("before", "rank 1 failed with ValueError: before 1 in 1"),
        ("work", "rank 1 failed with ZeroDivisionError: work 1 in 1"),
        ("end", "rank 1 failed with RuntimeError: end 1 in 1"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing_behind(kind, size, where, text):
    """R6: with an exchange in the second call, whose contents are checked."""
    results = on_ranks(kind, size, _fails_at, where, (1,))
    for rank, (name, said, seconds, after) in enumerate(results):
        expected = ("ValueError", "before 1 in 1") if where == "before" and rank == 1 else ("RemoteRankError", text)
        assert (name, said) == expected
        assert seconds < PROMPT_S
        assert after == right(size, 2)


def test_a_failure_in_a_group_without_rank_0():
    """R2, R3."""
    for name, said, seconds, after in on_members((1, 3), _fails_at, "work", (0,)):
        assert (name, said) == ("RemoteRankError", "rank 0 failed with ZeroDivisionError: work 0 in 1")
        assert seconds < PROMPT_S
        assert after == right(2, 2)


def test_the_error_has_the_failure_in_parts_and_its_cause():
    def work(transport):
        try:
            one_call(Ranks(transport, 20), "work" if transport.rank == 1 else "go")
        except RemoteRankError as error:
            return error.rank, error.kind, error.remote_message, type(error.__cause__).__name__
        raise AssertionError("nothing was raised")

    parts = (1, "ZeroDivisionError", "work 1 in 0")
    assert run_virtual(2, work) == [(*parts, "NoneType"), (*parts, "ZeroDivisionError")]


def _is_interrupted(ranks):
    def work():
        with Call(ranks) as call:
            call.meet({})
            with call.together("work"):
                if ranks.rank == 0:
                    raise KeyboardInterrupt

    first, seconds = outcome_of(work)
    return *first, seconds, one_call(ranks, "go", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_on_one_rank_is_told_to_the_others(kind):
    interrupted, other = on_ranks(kind, 2, _is_interrupted)
    assert interrupted[0] == "KeyboardInterrupt"
    assert other[:2] == ("RemoteRankError", "rank 0 failed with KeyboardInterrupt: ")
    assert other[2] < PROMPT_S
    assert interrupted[3] == other[3] == right(2, 2)


def _leaves_while_it_waits(ranks, error):
    """Rank 0 has done its work, waits for rank 1, and is interrupted there; then rank 1 finishes."""
    board = ranks.transport.board

    def shown(done):
        if ranks.rank == 0 and done == 1:
            raise error

    def work():
        with Call(ranks, on_progress=shown) as call:
            call.meet({})
            with call.together("work"):
                if ranks.rank == 1:
                    call.piece_done()
                    while board.get("left") is None:
                        time.sleep(0.01)
            # here an exchange would wait for rank 0

    first, seconds = outcome_of(work)
    if ranks.rank == 0:
        board.set("left", b"")
    after = one_call(ranks, "go", 2)
    board.delete("left")
    return *first, seconds, after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the progress bar's terminal is gone")])
def test_a_rank_that_leaves_while_it_waits_does_not_count_as_there(kind, error):
    left, other = on_ranks(kind, 2, _leaves_while_it_waits, error)
    assert left[0] == type(error).__name__
    assert other[:2] == ("RemoteRankError", f"rank 0 failed with {type(error).__name__}: {error}")
    assert other[2] < PROMPT_S
    assert left[3] == other[3] == right(2, 2)


def test_a_failure_of_an_inner_group_is_told_to_the_outer_one():
    """Ranks 0 and 1 are also a group of their own, in which rank 1 fails while rank 2 waits in the outer one."""
    inner = VirtualGroup(2)

    def work(transport):
        ranks = Ranks(transport, 20)

        def outer():
            with Call(ranks) as call:
                call.meet({})
                with call.together("work"):
                    if ranks.rank < 2:
                        one_call(Ranks(inner.transport(ranks.rank), 20), "work" if ranks.rank == 1 else "go")

        return outcome_of(outer)

    text = "rank 1 failed with ZeroDivisionError: work 1 in 0"
    *inside, outside = run_virtual(3, work)
    assert [result for result, _ in inside] == [("RemoteRankError", text)] * 2
    assert outside[0][0] == "RemoteRankError"
    assert outside[0][1].endswith(f"failed with RemoteRankError: {text}")
    assert outside[1] < PROMPT_S


def test_a_mismatch_of_an_inner_group_is_told_to_the_outer_one():
    inner = VirtualGroup(2)

    def work(transport):
        ranks = Ranks(transport, 20)

        def outer():
            with Call(ranks) as call:
                call.meet({})
                with call.together("work"):
                    if ranks.rank < 2:
                        one_call(Ranks(inner.transport(ranks.rank), 20), "go", ranks.rank)

        return outcome_of(outer)

    *inside, outside = run_virtual(3, work)
    assert [result[0] for result, _ in inside] == ["MismatchError"] * 2
    assert outside[0][0] == "RemoteRankError"
    assert "failed with MismatchError: the ranks of this call do not agree" in outside[0][1]
    assert outside[1] < PROMPT_S


def test_a_rank_learns_of_a_failure_between_two_pieces():
    """It does not finish its share first."""

    def work(transport):
        ranks, pieces = Ranks(transport, 20), 0
        with suppress(RemoteRankError), Call(ranks) as call:
            call.meet({})
            with call.together("work"):
                if ranks.rank == 1:
                    raise ValueError("at once")
                for _ in range(400):
                    time.sleep(0.01)
                    call.piece_done()
                    pieces += 1
        return pieces

    assert run_virtual(2, work)[0] < 300


def test_a_failure_to_clean_up_after_a_remote_failure_does_not_hide_it():
    """Rank 0 hears of rank 1's failure between two pieces, and then fails to clean up."""

    def work(transport):
        ranks = Ranks(transport, 20)

        def body():
            with Call(ranks) as call:
                call.meet({})
                with call.together("work"):
                    if ranks.rank == 1:
                        raise ValueError("first")
                    try:
                        while True:
                            call.piece_done()
                            time.sleep(0.001)
                    finally:
                        raise OSError("second")

        result = outcome_of(body)[0]
        note = ranks.transport.board.get("0/failed")
        return result[0], json.loads(note)["message"]

    assert run_virtual(2, work) == [("RemoteRankError", "first")] * 2


# --- races, made certain by a board that lets something happen at the worst moment


class StagedBoard(MemoryBoard):
    """Does something right before, and right after, the first rank closes a phase."""

    def __init__(self, before, after):
        super().__init__()
        self.before, self.after = before, after

    def add(self, key, amount):
        if amount > -2 or self.before is None:
            return super().add(key, amount)
        before, self.before = self.before, None
        before(self, key)
        value = super().add(key, amount)
        self.after()
        return value


def nothing(*_):
    """A stage that is left empty."""


def _staged(size, timeouts_s, before, after=nothing):
    """Ranks 0 and 1 of a group of which the rest is only said to be there; the outcome of each."""
    group = VirtualGroup(size)
    group.board = StagedBoard(before, after)
    outcomes = [None, None]
    for absent in range(2, size):
        group.board.set(f"0/facts/{absent}", b"{}")

    def run(rank):
        def work():
            with Call(Ranks(group.transport(rank), timeouts_s[rank])) as call:
                call.meet({})

        outcomes[rank] = outcome_of(work)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def test_the_last_rank_arrives_just_when_another_gives_up():
    """Rank 0's patience ends when rank 2 arrives: all have arrived, so rank 1, still waiting, must pass as well."""
    outcomes = _staged(3, (0.3, 2.0), lambda board, key: board.add(key, 1))
    assert [result[0] for result, _ in outcomes] == ["ok", "ok"]
    assert outcomes[1][1] < 1.5


def test_a_rank_is_late_while_another_finds_out_that_all_are_there():
    """Rank 1's patience ends, too, before rank 0 has seen that it gave up too soon."""
    outcomes = _staged(3, (0.3, 0.8), lambda board, key: board.add(key, 1), lambda: time.sleep(0.8))
    assert [result[0] for result, _ in outcomes] == ["ok", "ok"]


@pytest.mark.parametrize(("arrived", "then"), [(3, 3), (2, 2 - (1 << 30))])
def test_closing_a_phase_twice_at_one_moment_is_decided_by_the_first(arrived, then):
    """What the first finds is what counts, and the second leaves no trace."""
    group = VirtualGroup(3)
    first, second = (Call(Ranks(group.transport(rank), 1.0)) for rank in (0, 1))
    group.board.add("key", arrived)
    inside = []
    add = group.board.add

    def meanwhile(key, amount):
        value = add(key, amount)
        if not inside:
            inside.append(None)
            inside.append(second._close(key))
        return value

    group.board.add = meanwhile
    assert first._close("key") == arrived
    assert inside[1] < 0
    assert add("key", 0) == then


def test_two_ranks_give_up_together():
    outcomes = _staged(3, (0.3, 0.4), nothing, lambda: time.sleep(0.4))
    assert [result[0] for result, _ in outcomes] == ["MissingRankError", "MissingRankError"]
    assert all("for ranks 2 (global rank 2), which did not make this call" in result[1] for result, _ in outcomes)
    assert outcomes[1][1] < PROMPT_S


def test_a_rank_that_closes_a_phase_and_dies_does_not_keep_the_others_for_ever(monkeypatch):
    """It closed the phase, and never says why."""
    monkeypatch.setattr("halotile.comm.agreement._DECIDING_S", 0.3)
    group = VirtualGroup(3)
    group.board.add("0/at/start", -(1 << 30))

    def work():
        with Call(Ranks(group.transport(0), 0.2)) as call:
            call.meet({})

    (name, text), seconds = outcome_of(work)
    assert name == "MissingRankError"
    assert "for ranks 1 (global rank 1), 2 (global rank 2)" in text
    assert 0.4 < seconds < PROMPT_S


# --- many calls


def _keys(board):
    return {*board._notes, *board._counts}


def _notes_of_many_calls(ranks, acts):
    for label, act in enumerate(acts):
        with suppress(ValueError, RemoteRankError):
            one_call(ranks, act if ranks.rank == 0 else "go", label)
    with Call(ranks) as call:
        call.meet({})
        # every rank clears what it wrote itself
        with call.together("work"):
            pass
        with call.together("end"):
            pass
        # all have forgotten when all are here
        ranks.transport.all_reduce(torch.ones(1))
        keys = _keys(ranks.transport.board)
        ranks.transport.all_reduce(torch.ones(1))
    # and need not do so again
    assert ranks.transport.forgotten == call.number
    return keys


@pytest.mark.parametrize(
    "acts", [["go", "go"], ["work"], ["go", "before"], ["go", "before", "before", "end", "work", "before"]]
)
def test_the_board_is_cleared_of_earlier_calls(acts):
    for keys in on_ranks("virtual", 3, _notes_of_many_calls, acts):
        assert {key.split("/")[0] for key in keys} == {str(len(acts))}


def _store_notes(ranks):
    """A call's notes, and those of the one before, as the store has them."""
    one_call(ranks, "go", 1)
    number = ranks.transport.calls - 1
    board = ranks.transport.board
    names = [f"facts/{ranks.rank}", f"start/{ranks.rank}", f"end/{ranks.rank}"]
    there = [board.get(f"{number}/{name}") is not None for name in names]
    one_call(ranks, "go", 2)
    gone = [board.get(f"{number}/{name}") is None for name in names]
    # a forgotten counter starts again
    shared = board.add(f"{number}/at/start", 0) if ranks.rank == 0 else 0
    board.delete(f"{number}/at/start")
    return there, gone, shared


def test_the_store_is_cleared_of_earlier_calls():
    assert on_ranks("gloo", 2, _store_notes) == [([True] * 3, [True] * 3, 0)] * 2


def _many_calls(ranks, count):
    return [one_call(ranks, "go", label) == right(ranks.size, label) for label in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_calls_in_a_row(kind):
    size = 4 if kind == "virtual" else 2
    assert on_ranks(kind, size, _many_calls, 200) == [[True] * 200] * size


def _some_fail(ranks, count):
    """Every third call fails on one rank or another, in one place or another."""
    outcomes = []
    for label in range(count):
        fails = label % 3 == 1 and ranks.rank == label % ranks.size
        where = ("before", "work", "end")[label // 3 % 3]
        outcomes.append(outcome_of(lambda f=fails, w=where, n=label: one_call(ranks, w if f else "go", n))[0])
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_many_calls_of_which_some_fail(kind):
    for outcomes in on_ranks(kind, 3, _some_fail, 30):
        for label, (name, result) in enumerate(outcomes):
            if label % 3 == 1:
                assert name in ("RemoteRankError", "ValueError")
                assert f"{label % 3} in {label}" in result or f"in {label}" in result
            else:
                assert (name, result) == ("ok", right(3, label))


ACTS = st.sampled_from(["go", "go", "go", "before", "work", "end"])


@st.composite
def schedules(draw):
    ranks = draw(st.integers(1, 5))
    calls = draw(st.integers(1, 4))
    acts = draw(st.lists(st.lists(ACTS, min_size=ranks, max_size=ranks), min_size=calls, max_size=calls))
    return ranks, [*acts, ["go"] * ranks]


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_any_schedule_of_failures_ends_alike_on_every_rank(schedule):
    """In each call all succeed or all raise, for the earliest place in which one failed; and nobody waits in vain."""
    size, calls = schedule

    def work(transport):
        ranks = Ranks(transport, 20)
        return [
            outcome_of(lambda act=acts[ranks.rank], n=label: one_call(ranks, act, n))
            for label, acts in enumerate(calls)
        ]

    by_rank = run_virtual(size, work, timeout_s=20)
    for label, acts in enumerate(calls):
        where = next((place for place in ("before", "work", "end") if place in acts), None)
        culprits = [rank for rank, act in enumerate(acts) if act == where]
        for rank in range(size):
            (name, text), seconds = by_rank[rank][label]
            assert seconds < PROMPT_S
            if where is None:
                assert (name, text) == ("ok", right(size, label))
            elif where == "before" and rank in culprits:
                assert (name, text) == ("ValueError", f"before {rank} in {label}")
            else:
                assert name == "RemoteRankError"
                assert any(text.endswith(f"{where} {culprit} in {label}") for culprit in culprits)


def test_a_refusal_on_every_rank_is_its_own_error_and_costs_no_wait():
    """Shapes alone decide whether a request is possible, so all refuse alike, before they meet."""

    def work(transport):
        ranks = Ranks(transport, 20)

        def refuse():
            with Call(ranks):
                raise PlanError("cannot be")

        return outcome_of(refuse), one_call(ranks, "go", 1)

    for ((name, text), seconds), after in run_virtual(3, work):
        assert (name, text) == ("PlanError", "cannot be")
        assert seconds < PROMPT_S
        assert after == right(3, 1)


def test_the_errors_are_what_callers_may_catch():
    assert issubclass(MissingRankError, TimeoutError)
    assert issubclass(RemoteRankError, RuntimeError)
    assert issubclass(MismatchError, RuntimeError)
