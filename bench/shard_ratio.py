"""A sharded decode on two ranks against one rank, and against DistVAE, from interleaved runs.

    python bench/shard_ratio.py [--cases kl wan ltx2 hunyuan] [--batches 1 2] [--rounds 5] [--no-distvae]
    python bench/shard_ratio.py --profile --cases wan --batches 1
    HALOTILE_SIMPLE_CONV=1 python bench/shard_ratio.py        # the oracle of the fast convolution

Every round times, one after the other and on an otherwise idle machine: the VAE's own decode in a process with one
thread, the same in one with two, halotile over two ranks with one thread each (every rank gets the picture), and
DistVAE over the same two. The processes live for all rounds of a case and wait at a pipe while others work; ranks start
at a barrier. The first rounds warm up (heaps grow until their gaps fit) and are left out; the order turns from round to
round. Printed are the median, least and largest ratio of a round. A wall time of ranks is that of the slower one; their
CPU seconds are those of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import distvae_peer
import numpy as np
import torch
from shard_actors import ALLOCATOR, Actor, Contestant, Took, together
from shard_cases import CASES

import halotile

RANKS = 2
WARM_UPS = 3


@dataclass
class Players:
    """All processes of a run."""

    one: Actor
    two: Actor
    ranks: list[Actor]

    @classmethod
    def start(cls, store: str) -> Players:
        """One process with one thread, one with two, and the ranks."""
        return cls(Actor(1), Actor(RANKS), [Actor(1, rank, RANKS, store) for rank in range(RANKS)])

    def stop(self) -> None:
        """End them."""
        for actor in self.all:
            actor.process.kill()
            actor.process.join()

    @property
    def all(self) -> list[Actor]:
        return [self.one, self.two, *self.ranks]


Round = dict[str, list[Took]]
"""contestant -> what each of its processes took"""


def main() -> None:
    """Parse the command line, start the processes and run case after case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, help="latents along height and width, instead of the case's own")
    parser.add_argument("--no-distvae", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead of measuring")
    args = parser.parse_args()
    peer = distvae_peer.version() is not None and not args.no_distvae
    introduced = False
    for case in args.cases:
        for batch in args.batches:
            with tempfile.TemporaryDirectory() as folder:
                # what one case leaves in a heap slows the next
                players = Players.start(os.path.join(folder, "store"))
                if not introduced:
                    introduce(players)
                    introduced = True
                run(players, case, batch, args, peer)
                players.stop()


def run(players: Players, case: str, batch: int, args: argparse.Namespace, peer: bool) -> None:
    """All rounds of one case."""
    refusals = together(players.all, "load", case, batch, args.side, peer)
    title = f"{CASES[case].title}, latents {shape_of(case, batch, args.side)}"
    if args.profile:
        show_profile(title, players)
        return
    contestants = ["one", "two", "halotile"] + ["distvae"] * (peer and refusals[-1] is None)
    show(title, [play(players, contestants, number) for number in range(args.rounds + WARM_UPS)])
    if refusals[-1] is not None:
        print(f"  DistVAE refuses the class: {refusals[-1]}")


def introduce(players: Players) -> None:
    """Say what runs, and that the allocator is set alike for all."""
    faults = together(players.all, "faults_of_a_buffer")
    print(
        f"halotile {halotile.__version__}, torch {torch.__version__}, DistVAE {distvae_peer.version()}; "
        f"HALOTILE_SIMPLE_CONV={os.environ.get('HALOTILE_SIMPLE_CONV', '')}\n"
        f"allocator of every process: {', '.join(f'{name}={value}' for name, value in ALLOCATOR.items())}; "
        f"page faults of writing a buffer of 256 MB again: {faults} of 65536",
        flush=True,
    )


def shape_of(case: str, batch: int, side: int | None) -> str:
    """The latents' shape, to be printed."""
    shape = CASES[case].latents
    return " x ".join(str(size) for size in (batch, *(shape if side is None else (*shape[:-2], side, side))))


def play(players: Players, contestants: list[str], number: int) -> Round:
    """One round: each contestant decodes once, alone on the machine. Round 0 keeps the pictures."""
    turn = number % len(contestants)
    taken: Round = {}
    for name in (*contestants[turn:], *contestants[:turn]):
        actors = {"one": [players.one], "two": [players.two]}.get(name, players.ranks)
        contestant: Contestant = "plain" if name in ("one", "two") else "halotile" if name == "halotile" else "distvae"
        taken[name] = together(actors, "decode", contestant, number == 0)
    return taken


def show(title: str, rounds: list[Round]) -> None:
    """Print the ratios of the rounds, and traffic and error from the one that warmed up."""
    first, rounds = rounds[0], rounds[WARM_UPS:]
    refused = {name: took[0].refusal for name, took in first.items() if took[0].refusal is not None}
    present = [name for name in first if name not in refused]
    print(f"\n{title}; {len(rounds)} rounds, {RANKS} ranks with one thread each")
    for name, reason in refused.items():
        print(f"  {name} refused it: {reason}")
    print(
        "  seconds, median: " + ", ".join(f"{n} {statistics.median(wall(r, n) for r in rounds):.2f}" for n in present)
    )
    for name in ("halotile", "distvae"):
        if name in present:
            line(f"{name}: wall / one rank, one thread", rounds, lambda r, name=name: wall(r, name) / wall(r, "one"))
            line(f"{name}: wall / one rank, two threads", rounds, lambda r, name=name: wall(r, name) / wall(r, "two"))
            line(f"{name}: CPU of both / one rank's", rounds, lambda r, name=name: cpu(r, name) / cpu(r, "one"))
    if {"halotile", "distvae"} <= set(present):
        line("halotile / DistVAE: wall", rounds, lambda r: wall(r, "halotile") / wall(r, "distvae"))
        line("halotile / DistVAE: CPU", rounds, lambda r: cpu(r, "halotile") / cpu(r, "distvae"))
    for name in present:
        if name in ("halotile", "distvae"):
            show_traffic_and_error(name, first)


def line(title: str, rounds: list[Round], ratio: Callable[[Round], float]) -> None:
    """Print the median, least and largest of a ratio."""
    ratios = [ratio(taken) for taken in rounds]
    print(f"  {title + ':':44} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


def wall(taken: Round, name: str) -> float:
    """Wall seconds of a contestant: its slowest process."""
    return max(took.wall_s for took in taken[name])


def cpu(taken: Round, name: str) -> float:
    """CPU seconds of a contestant: all its processes, all their threads."""
    return sum(took.cpu_s for took in taken[name])


def show_traffic_and_error(name: str, first: Round) -> None:
    """Print what the first rank sent in a decode, and how far each rank's picture is from one rank's."""
    took, whole = first[name][0], first["one"][0].output
    report: dict[str, Any] = took.report
    own = (
        f"; by its own report {report['messages']} messages, {report['collectives']} collectives and agreements, "
        f"{report['bytes_sent'] / 1e6:.2f} MB; gathers {report['gathers']}, of attention {report['attention_gathers']}"
        if report
        else ""
    )
    errors = [float(np.abs(each.output - whole).max() / np.abs(whole).max()) for each in first[name]]
    print(
        f"  {name}, rank 0, a decode: {took.calls.calls} calls of torch.distributed: {took.calls.messages} messages "
        f"and collectives{own}\n  {name}: largest error / largest value: " + ", ".join(f"{e:.2g}" for e in errors),
        flush=True,
    )


def show_profile(title: str, players: Players) -> None:
    """Print the operations that take most, of the plain decode and of rank 0's share."""
    print(f"\n{title}: the plain decode\n{together([players.one], 'profile', 'plain')[0]}")
    print(f"\n{title}: halotile, rank 0\n{together(players.ranks, 'profile', 'halotile')[0]}", flush=True)


if __name__ == "__main__":
    main()
