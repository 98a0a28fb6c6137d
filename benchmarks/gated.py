"""Measures recovery rates and time of the gated search, and the time of the paper's search on the same device.

    make bench NAME=gated                                # all rows that are feasible on this device
    make bench NAME=gated ARGS="--rows m200 --batches 50"

The data are CIFAR-10 test images (SPEARPP_DATA) with standard normalisation. Each batch has its own seed (1000, 1001,
...) and a fresh 3072-m-m-m-10 network. Gradients are float32.
"""

import sys
from itertools import chain

import torch

from benchmarks import command
from benchmarks.recovery import Setting, measure
from spearpp.search import Gated, RiemannianAdam
from spearpp.simulate import DPSGD, FedAvg


def rows(name: str) -> list[Setting]:
    """Return the settings of one block of rows."""
    gated = Gated()
    table = {
        "m200": [(20, 200, "98 %"), (25, 200, "86 %"), (30, 200, "25 %"), (40, 200, "-"), (50, 200, "-")],
        "m1000": [(65, 1000, "100 %"), (100, 1000, "41 %"), (150, 1000, "0 %"), (200, 1000, "-")],
        "m4000": [(100, 4000, "100 %"), (150, 4000, "100 %"), (210, 4000, "77 %")],
        "large": [(400, 4000, "-"), (600, 4000, "-")],
    }
    if name in table:
        return [Setting("gated", b, m, gated, paper) for b, m, paper in table[name]]
    if name == "noise200":
        return [
            Setting("gated, FedAvg E=3", 20, 200, gated, "75 %, 67.8 dB", FedAvg(3, 5, 1e-2), 25.0),
            Setting("gated, DP 1e-4", 20, 200, gated, "75 %, 31.9 dB", DPSGD(2.0, 1e-4), 25.0, bound=True),
        ]
    if name == "noise4000":
        return [
            Setting("gated, FedAvg E=15", 150, 4000, gated, "92 %, 63.7 dB", FedAvg(15, 30, 1e-2), 25.0),
            Setting("gated, DP 1e-6", 150, 4000, gated, "88 %, 55.5 dB", DPSGD(2.0, 1e-6), 25.0, bound=True),
        ]
    # The paper's search with all its 1e6 starts: sparsity=1.0 accepts no candidate, so the search does not stop early.
    return [
        Setting("paper's 1e6 starts", b, m, RiemannianAdam(sparsity=1.0), "-", batches=1)
        for b, m in ((100, 1000), (210, 4000))
    ]


def main() -> int:
    cuda = torch.cuda.is_available()
    blocks = ["m200", "noise200", "m1000"] + (["m4000", "noise4000", "large", "time"] if cuda else [])
    parser = command.parser(__doc__)
    parser.add_argument(
        "--rows", nargs="+", default=blocks, help="any of m200 noise200 m1000 m4000 noise4000 large time"
    )
    parser.add_argument("--batches", type=int, default=50 if cuda else 20)
    options = parser.parse_args()
    measured = (measure(rows(name), options.batches, options.data, options.device) for name in options.rows)
    return command.run(chain.from_iterable(measured), options.out)


if __name__ == "__main__":
    sys.exit(main())
