"""One call of a group: the ranks compare what they are about to do, and fail together.

All of it goes over the group's board, not over its collectives: a rank that gives up leaves nothing behind that the
next call could receive, and a call that waits in vain can say for whom.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Literal, NoReturn, get_args

from halotile.comm.ranks import Ranks
from halotile.comm.transport import LinkError, check_not_lost
from halotile.errors import HalotileError, MismatchError, MissingRankError, RemoteRankError

Phase = Literal["start", "work", "end", "raised"]
"""Where the ranks of a call wait for each other: all have come, all have worked, all have their result, all raised."""
PHASES: tuple[Phase, ...] = get_args(Phase)

# no facts' names
_ASIDE = ""
_ADDRESS = " "
# so far below zero that the arrivals of no group lift it back
_GIVEN_UP = -(1 << 30)
_MAX_POLL_S = 0.02
# a rank that has closed a phase needs no longer than this to say what that means
_DECIDING_S = 5.0
# between ranks that run into the same error at the same point
_SAME_ERROR_S = 1.0


class Call:
    """The shared life of one collective call, from `Ranks` as they stand; calls of a group are numbered.

    `meet` compares facts before any work; `together` is a phase of independent work. Either raises on every rank when
    a rank failed, gave up or disagrees. Every way out but success must go through `fail`, so use it as a context
    manager: an exception inside is told to the others.
    """

    def __init__(self, ranks: Ranks, on_progress: Callable[[int], None] | None = None) -> None:
        self.ranks = ranks
        self._on_progress = on_progress
        self._board = ranks.transport.board
        self._settled = False
        self._settled_alike = False
        self._note = b""
        self._entered = ranks.transport.entered
        self.number = ranks.transport.calls
        ranks.transport.calls += 1

    def __enter__(self) -> Call:
        check_not_lost(self.ranks.transport)
        self.ranks.transport.timeout_s = self.ranks.timeout_s
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    def meet(self, facts: Mapping[str, str], aside: str = "") -> list[str]:
        """Wait for all ranks, compare `facts` (and the call's number) with theirs, and return what each says `aside`.

        Raises MismatchError with who has what, MissingRankError with who did not come, RemoteRankError when a rank
        could not even begin.
        """
        transport = self.ranks.transport
        mine = {**facts, _ASIDE: aside, _ADDRESS: transport.address}
        self._board.set(self._key(f"facts/{self.ranks.rank}"), json.dumps(mine).encode())
        self._arrive("start")
        self._forget_earlier()
        said = [self._facts_of(rank) for rank in range(self.ranks.size)]
        asides, addresses = ([each.pop(name, "") for each in said] for name in (_ASIDE, _ADDRESS))
        names = list(dict.fromkeys(name for each in said for name in each))
        lines = [
            f"{name}: " + ", ".join(f"rank {rank} has {each.get(name, 'nothing')}" for rank, each in enumerate(said))
            for name in names
            if len({each.get(name) for each in said}) > 1
        ]
        if lines:
            self._settled = True
            raise MismatchError("the ranks of this call do not agree, so none of them starts:\n  " + "\n  ".join(lines))
        try:
            transport.meet(addresses)
        except LinkError as error:
            self._raise_cut_off(error)
        return asides

    @contextmanager
    def shared_fate(self) -> Iterator[None]:
        """Whatever this rank raises inside, other than halotile's own errors, is RemoteRankError on every rank."""
        try:
            yield
        except LinkError as error:
            self._raise_cut_off(error)
        except HalotileError:
            raise
        except Exception as error:
            self.fail(error)
            raise RemoteRankError(self.ranks.rank, type(error).__name__, str(error)) from error

    @contextmanager
    def together(self, phase: Phase) -> Iterator[None]:
        """A phase of independent work with a shared fate, left when every rank has finished it."""
        with self.shared_fate():
            yield
        self._arrive(phase)

    @contextmanager
    def entangled(self, phase: Phase) -> Iterator[None]:
        """A phase of work in which the ranks wait for each other's messages, left when every rank has finished it.

        What all ranks raise alike, at the same point of their work, leaves the group as it was: halotile's own errors
        come out as they are. Else every rank raises RemoteRankError (MissingRankError where a rank is gone), and the
        group is lost: messages are left on their way, and others may wait for more of them.
        """
        transport = self.ranks.transport
        try:
            try:
                yield
            except LinkError as error:
                self._raise_cut_off(error)
            except Exception as error:
                if self._all_raise(error):
                    if isinstance(error, HalotileError):
                        raise
                    raise RemoteRankError(self.ranks.rank, type(error).__name__, str(error)) from error
                self._raise_failure()
                self.fail(error)
                transport.abort(self._how_lost(f"rank {self.ranks.rank} failed with {type(error).__name__}"))
                raise RemoteRankError(self.ranks.rank, type(error).__name__, str(error)) from error
            self._arrive(phase)
        except BaseException as error:
            if not self._settled_alike:
                self.fail(error)
                transport.abort(self._how_lost(str(error) or type(error).__name__))
            raise

    def check(self) -> None:
        """Raise if another rank has failed: for waits that are not the board's."""
        self._raise_failure()

    def note(self, text: bytes) -> None:
        """Leave a note for the others to read when this phase is passed: what only this rank can know of its work."""
        self._note = text

    def notes(self, phase: Phase) -> list[bytes]:
        """The notes of all ranks in a phase that was passed, in rank order."""
        found = [self._board.get(self._key(f"{phase}/{rank}")) for rank in range(self.ranks.size)]
        assert None not in found, f"phase {phase!r} is not passed"
        return [note or b"" for note in found]

    def piece_done(self) -> None:
        """Between two pieces of a phase's work: count one as done, and stop if another rank has failed meanwhile."""
        self._show(self._board.add(self._key("done"), 1))
        self._raise_failure()

    def glance(self) -> None:
        """Between two pieces that another rank counts: see how many are done, and stop if a rank has failed."""
        self._show(self._board.add(self._key("done"), 0))
        self._raise_failure()

    def _show(self, done: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done)

    def fail(self, error: BaseException) -> None:
        """Tell the others of `error`, unless they know of this call's failure. Never waits and never raises."""
        if self._settled:
            return
        self._settled = True
        record = {"rank": self.ranks.rank, "kind": type(error).__name__, "message": str(error)[:4000]}
        # the error on its way out must not be replaced by one of the board
        with suppress(Exception):
            self._board.set(self._key("failed"), json.dumps(record).encode())

    def _arrive(self, phase: Phase, patience_s: float | None = None) -> None:
        """Count this rank in at `phase` and wait for the rest; a phase that all have reached is passed by all."""
        key = self._key(f"at/{phase}")
        self.ranks.counters.collectives += 1
        self._board.set(self._key(f"{phase}/{self.ranks.rank}"), self._note)
        self._note = b""
        try:
            if self._board.add(key, 1) != self.ranks.size:
                self._wait_for_the_rest(phase, key, self.ranks.timeout_s if patience_s is None else patience_s)
        except (RemoteRankError, MissingRankError):
            raise
        except BaseException:
            # interrupted while it waits: it was counted, but will not go on, so nobody else may
            with suppress(Exception):
                self._close(key)
            raise

    def _wait_for_the_rest(self, phase: Phase, key: str, patience_s: float) -> None:
        pause, seen_done, deadline = 0.0002, -1, time.monotonic() + patience_s
        while True:
            # whoever passes a phase may fail in the next one: then all have arrived, and this rank may pass as well
            failed = self._board.get(self._key("failed"))
            here = self._board.add(key, 0)
            if here == self.ranks.size:
                return
            if failed is not None or here < 0:
                self._raise_failure()
            done = self._board.add(self._key("done"), 0)
            if done != seen_done:
                # a rank that still finishes pieces is late, not lost
                seen_done, deadline = done, time.monotonic() + patience_s
                self._show(done)
            late = time.monotonic() - deadline
            if late > 0:
                before = self._close(key)
                if before == self.ranks.size:
                    return
                if before >= 0 or late > _DECIDING_S:
                    raise MissingRankError(self._who_is_missing(phase))
            time.sleep(pause)
            pause = min(pause * 1.5, _MAX_POLL_S)

    def _close(self, key: str) -> int:
        """Let nobody pass a phase any more, unless all have arrived, or another rank is closing it at this moment.

        Returns how many had arrived, below zero when another rank was first: one counter decides, and one rank.
        """
        before = self._board.add(key, _GIVEN_UP) - _GIVEN_UP
        if before < 0 or before == self.ranks.size:
            self._board.add(key, -_GIVEN_UP)
        return before

    def _who_is_missing(self, phase: Phase) -> str:
        absent = [r for r in range(self.ranks.size) if self._board.get(self._key(f"{phase}/{r}")) is None]
        names = self._named(absent)
        what = "make this call" if phase == "start" else f"finish the phase '{phase}'"
        return (
            f"rank {self.ranks.rank} waited {self.ranks.timeout_s:g} s in call {self.number} for ranks {names}, which "
            f"did not {what}; all {self.ranks.size} ranks of the group must"
        )

    def _named(self, ranks: list[int]) -> str:
        return ", ".join(f"{rank} (global rank {self.ranks.global_rank(rank)})" for rank in ranks)

    def _all_raise(self, error: Exception) -> bool:
        """Whether every rank raises this error at this point; all ranks get the same answer."""
        passed = self.ranks.transport.entered - self._entered
        self.note(json.dumps([type(error).__name__, str(error)[:4000], passed]).encode())
        patience = self.ranks.timeout_s if isinstance(error, HalotileError) else _SAME_ERROR_S
        try:
            self._arrive("raised", min(patience, self.ranks.timeout_s))
        except (RemoteRankError, MissingRankError):
            return False
        self._settled_alike = self._settled = len(set(self.notes("raised"))) == 1
        return self._settled_alike

    def _raise_cut_off(self, error: LinkError) -> NoReturn:
        """This rank's messages ended unfinished: raise what the rank that gave up says, or who is gone."""
        self.ranks.transport.abort(self._how_lost(str(error)))
        where = f"rank {self.ranks.rank} lost its connections in call {self.number}"
        try:
            self._board.set(self._key(f"cut off/{self.ranks.rank}"), b"")
            deadline = time.monotonic() + min(_DECIDING_S, self.ranks.timeout_s)
            silent = list(range(self.ranks.size))
            while silent and time.monotonic() < deadline:
                self._raise_failure()
                silent = [rank for rank in silent if self._board.get(self._key(f"cut off/{rank}")) is None]
                time.sleep(_MAX_POLL_S)
        except HalotileError:
            raise
        except Exception as gone:
            raise MissingRankError(
                f"{where}, and nor does the board answer: the process that keeps it is gone"
            ) from gone
        names = self._named(silent)
        lost = MissingRankError(
            f"{where}, and ranks {names} no longer answer ({error})" if silent else f"{where} ({error})"
        )
        self.fail(lost)
        raise lost from error

    def _how_lost(self, what: str) -> str:
        return f"call {self.number}: {what[:400]}"

    def _raise_failure(self) -> None:
        note = self._board.get(self._key("failed"))
        if note is not None:
            self._settled = True
            record = json.loads(note)
            if record["kind"] == MissingRankError.__name__:
                raise MissingRankError(record["message"])
            raise RemoteRankError(record["rank"], record["kind"], record["message"])

    def _facts_of(self, rank: int) -> dict[str, str]:
        note = self._board.get(self._key(f"facts/{rank}"))
        assert note is not None, f"rank {rank} arrived without its facts"
        return {str(name): str(value) for name, value in json.loads(note).items()}

    def _forget_earlier(self) -> None:
        """Clear the board of earlier calls; every rank is past them, since every rank has come to this one."""
        mine = [f"facts/{self.ranks.rank}", f"cut off/{self.ranks.rank}", *(f"{p}/{self.ranks.rank}" for p in PHASES)]
        shared = ["failed", "done", *(f"at/{p}" for p in PHASES)] if self.ranks.rank == 0 else []
        transport = self.ranks.transport
        for number in range(transport.forgotten, self.number):
            for name in (*mine, *shared):
                self._board.delete(f"{number}/{name}")
        transport.forgotten = self.number

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"
