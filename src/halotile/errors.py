"""Every exception of the library. A user's mistake never surfaces as anything else."""

from __future__ import annotations


class HalotileError(Exception):
    """Base of all errors that halotile raises on purpose."""


class PlanError(HalotileError, ValueError):
    """Numbers that cannot be: a window, stride, shape or rank count. The message names them."""


class UnsupportedError(HalotileError, NotImplementedError):
    """A class, a loop or an option that halotile cannot serve. The message names it and the reason."""


class GradientError(HalotileError, RuntimeError):
    """halotile is for inference; the call would have needed gradients."""


class MembershipError(HalotileError, RuntimeError):
    """The calling process is not a member of the group it passed."""


class MismatchError(HalotileError, RuntimeError):
    """The ranks of one call do not agree on what they are about to do. The message lists who has what."""


class RemoteRankError(HalotileError, RuntimeError):
    """A rank failed during work that all ranks share; raised on every rank.

    ``rank`` is the group-local rank that failed, ``kind`` the name of its exception type.
    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"rank {rank} failed with {kind}: {message}")
        self.rank = rank
        self.kind = kind
        self.remote_message = message

    def __reduce__(self) -> tuple[type[RemoteRankError], tuple[int, str, str]]:
        # worker processes hand their exceptions on by pickle
        return type(self), (self.rank, self.kind, self.remote_message)


class LostGroupError(HalotileError, RuntimeError):
    """The group was given up in an earlier call that failed half-way. The message says how; make a new group."""


class MissingRankError(HalotileError, TimeoutError):
    """Some ranks of the group did not arrive within the timeout. The message says which."""


class BusyError(HalotileError, RuntimeError):
    """The fleet is at work on another job, and does one at a time."""
