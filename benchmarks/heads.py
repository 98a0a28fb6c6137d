"""Measures how many batches of features an audit recovers from the output layer of a classifier alone.

    make bench NAME=heads
    make bench NAME=heads ARGS="--batches 10 --sizes 20 40"

A frozen backbone with random weights (two convolutions with BatchNorm, ReLU and average pooling) turns CIFAR-10 test
images (SPEARPP_DATA) into 512 features. Only a new head of 100 classes is trained, and the client sends its gradient
in float32. The labels are random. A batch is exact if the features of all samples are certified. A certified input is
wrong if it is farther than three times its stated error from the features of every sample.
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

import spearpp
from benchmarks import command
from benchmarks.equations import wrong
from benchmarks.recovery import FIRST_SEED
from spearpp import simulate
from spearpp.errors import RankError
from spearpp.model.following import Following
from spearpp.simulate import Batch
from spearpp.types import Tensor

CLASSES, FEATURES, SECONDS, STATISTICS = 100, 512, 60.0, 512


@dataclass(frozen=True)
class Row:
    """What the batches of one size gave."""

    classes: int
    b: int
    batches: int
    exact: int
    certified: int
    visible: int
    wrong: int
    starts: float
    seconds: float
    """Median duration of an inversion."""


def backbone(images: Tensor) -> nn.Module:
    """Return a frozen network from 3 x 32 x 32 pixels to 512 features. Its statistics are those of the images."""
    first = (nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32, momentum=None), nn.ReLU())
    second = (nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32, momentum=None), nn.ReLU())
    network = nn.Sequential(*first, *second, nn.AvgPool2d(2), nn.Flatten()).requires_grad_(False)
    network(images)
    return network.eval()


def measure(b: int, batches: int, data: str | None, device: torch.device) -> Row:
    """Invert the heads of all batches of one size."""
    exact = certified = visible = mistakes = starts = 0
    times = []
    for seed in range(FIRST_SEED, FIRST_SEED + batches):
        generator = torch.Generator().manual_seed(seed)
        images = simulate.cifar10(b, path=data, generator=generator)
        others = simulate.cifar10(STATISTICS, path=data, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(seed)
        network = backbone(others.inputs.reshape(-1, 3, 32, 32))
        features = network(images.inputs.reshape(-1, 3, 32, 32)).to(device)
        labels = torch.randint(CLASSES, (b,), generator=generator).to(device)
        batch = Batch(features, labels, images.normalisation)
        head = simulate.fedsgd(nn.Linear(FEATURES, CLASSES).to(device), batch)[0]
        began = time.perf_counter()
        try:
            result = spearpp.invert(*head, following=Following.of_output(CLASSES), seconds=SECONDS)
        except RankError:  # the gradient does not show a rank below the number of classes
            continue
        times.append(time.perf_counter() - began)
        found = int(result.certified.sum())
        exact += found == result.batch_size == b
        certified, visible, starts = certified + found, visible + result.batch_size, starts + result.stats.starts
        mistakes += wrong(batch, result)
    middle = statistics.median(times) if times else float("nan")
    return Row(CLASSES, b, batches, exact, certified, visible, mistakes, starts / batches, middle)


def main() -> int:
    """Measure the batch sizes that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--sizes", nargs="+", type=int, default=[20, 40, 45, 48])
    options.add_argument("--batches", type=int, default=50)
    given = options.parse_args()
    rows = (measure(b, given.batches, given.data, given.device) for b in given.sizes)
    return command.run(command.printed(rows), given.out)


if __name__ == "__main__":
    sys.exit(main())
