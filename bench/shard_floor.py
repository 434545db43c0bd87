"""What a perfect split would be: two plain decodes of half the latents side by side, over one of the whole.

    python bench/shard_floor.py [--cases kl] [--rounds 5]

Nothing is exchanged, so the pictures are wrong at the seam. What `shard_ratio.py` has above these ratios is halotile's,
where the halves get the kernel of the whole (the 3-D classes do not in float32, see `spatial/rules/kernel.py`) and but
for attention, which is cheaper over half of the tokens than a rank's share of it.

The last line of a case is what the machine takes itself when both of its cores work: the CPU seconds of two plain
decodes of the whole, side by side, over those of one alone. They share nothing but caches and memory.
"""

from __future__ import annotations

import argparse
import statistics

from shard_actors import Actor, together
from shard_cases import CASES

WARM_UPS = 3


def main() -> None:
    """Print wall and CPU seconds of the halves over the whole's, medians with the least and the largest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["kl"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for case in args.cases:
        whole, halves, wholes = [Actor(1)], [Actor(1), Actor(1)], [Actor(1), Actor(1)]
        together([*whole, *halves, *wholes], "load", case, 1, None, False)
        together(halves, "halve")
        ratios: dict[str, list[float]] = {"halves, wall": [], "halves, CPU": [], "two at once, CPU of each": []}
        for number in range(args.rounds + WARM_UPS):
            (one,) = together(whole, "decode", "plain", False)
            two = together(halves, "decode", "plain", False)
            both = together(wholes, "decode", "plain", False)
            if number >= WARM_UPS:
                taken = max(took.wall_s for took in two) / one.wall_s, sum(took.cpu_s for took in two) / one.cpu_s
                for name, ratio in zip(ratios, (*taken, sum(took.cpu_s for took in both) / 2 / one.cpu_s), strict=True):
                    ratios[name].append(ratio)
        for name, each in ratios.items():
            print(
                f"{CASES[case].title}, {name}: {statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})",
                flush=True,
            )
        for actor in (*whole, *halves, *wholes):
            actor.process.kill()


if __name__ == "__main__":
    main()
