"""Peak bytes of live activations on each rank of a sharded decode, over one rank's.

    python bench/shard_memory.py [--cases kl wan ltx2] [--ranks 2 4] [--deliver all sharded]

Both are the report's `peak_activation_bytes`: the same meter follows the storages of a plain decode on one rank
(strategy="serial") and of each rank of a sharded one. Time does not matter here.
"""

from __future__ import annotations

import argparse
import os
import tempfile

from shard_actors import Actor, together
from shard_cases import CASES


def main() -> None:
    """Parse the command line; a line a case, delivery and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["kl", "wan", "ltx2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--deliver", nargs="+", choices=("all", "sharded"), default=["all", "sharded"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--side", type=int, help="latents along height and width, instead of the case's own")
    args = parser.parse_args()
    one = Actor(1)
    whole = {}
    for case in args.cases:
        together([one], "load", case, args.batch, args.side, False)
        whole[case] = together([one], "peak", "serial", "all")[0]["peak_activation_bytes"]
        if whole[case] is None:
            raise SystemExit("strategy='serial' reports no peak_activation_bytes, so there is nothing to compare with")
        print(f"{CASES[case].title}: one rank {whole[case] / 1e6:.1f} MB", flush=True)
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [Actor(1, rank, size, os.path.join(folder, "store")) for rank in range(size)]
            for case in args.cases:
                together(ranks, "load", case, args.batch, args.side, False)
                for deliver in args.deliver:
                    peaks = [report["peak_activation_bytes"] for report in together(ranks, "peak", "shard", deliver)]
                    ratios = ", ".join(f"{peak / whole[case]:.3f}" for peak in peaks)
                    print(f"{CASES[case].title}, {size} ranks, deliver={deliver}: {ratios} of one rank's", flush=True)


if __name__ == "__main__":
    main()
