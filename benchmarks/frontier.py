"""How large a batch comes back: one witness against two, by width, on normalised and raw pixels.

    make bench-frontier                                        # the rows this device can do
    make bench-frontier ARGS="--rows raw m1000 --batches 20"

CIFAR-10 test images (SPEARPP_DATA), fresh 3072-m-m-m-10 network, float32 gradients, one seed a batch
from 1000 on. Two witnesses are the gradients of the first two layers.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.recovery import Recovery, Setting, measure
from spearpp.errors import SpearError
from spearpp.search import Gated

TARGETS = {
    "m200": [(200, 60, "98 %", 50), (200, 80, "90 %", 50), (200, 90, "0.45 m", 50), (200, 95, "-", 10)],
    "raw": [(200, 20, "99 %", 50), (200, 40, "95 %", 50), (200, 80, "-", 20), (200, 90, "-", 20)],
    "m500": [(500, 200, "-", 10), (500, 225, "0.45 m", 10), (500, 235, "-", 10)],
    "m1000": [(1000, 250, "98 %", 20), (1000, 300, "90 %", 20), (1000, 400, "half", 10), (1000, 450, "0.45 m", 5)],
    "m2000": [(2000, 800, "-", 3), (2000, 900, "0.45 m", 3)],
    "m4000": [(4000, 800, "all", 5), (4000, 1200, "most", 5)],
    "m4000far": [(4000, 1600, "-", 1), (4000, 1800, "0.45 m", 1)],
    "one": [(200, 50, "0.25 m", 20), (500, 125, "0.25 m", 10), (1000, 250, "0.25 m", 3)],
    "oneraw": [(200, 20, "95 %", 20), (200, 30, "-", 20), (200, 40, "-", 20)],
}


def rows(name: str) -> list[Setting]:
    """The settings of one block of rows."""
    one = name.startswith("one")
    raw = name.endswith("raw")
    label = f"{'one witness' if one else 'two witnesses'}{', raw' if raw else ''}"
    return [
        Setting(label, b, m, Gated(), aim, batches=batches, witnesses=1 if one else 2, raw=raw)
        for m, b, aim, batches in TARGETS[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    blocks = list(TARGETS) if cuda else ["m200", "raw", "m500", "oneraw"]
    parser.add_argument("--rows", nargs="+", choices=list(TARGETS), default=blocks)
    parser.add_argument("--batches", type=int, help="batches of every row; default: each row's own")
    parser.add_argument("--data", help="CIFAR-10 npz or its folder; default SPEARPP_DATA")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--out", type=Path, help="write the rows as JSON too")
    options = parser.parse_args()
    measured: list[Recovery] = []
    try:
        for name in options.rows:
            for row in measure(rows(name), options.batches, options.data, torch.device(options.device)):
                measured.append(row)
                if options.out:
                    options.out.write_text(json.dumps([asdict(each) for each in measured], indent=1))
    except SpearError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
