"""Measures how many batches the equations of the network recover, by activation, width and batch size.

    make bench NAME=equations                                          # all rows of networks with 200 neurons a layer
    make bench NAME=equations ARGS="--rows gelu120 gelu140 --batches 10"
    make bench NAME=equations ARGS="--rows m1000 m4000 --device cuda"  # H200
    make bench NAME=equations ARGS="--rows trained"                    # networks after 25 epochs

The data are CIFAR-10 test images (SPEARPP_DATA). Each batch has its own seed (1000, 1001, ...) and a fresh
3072-m-…-m-10 network, unless the row says otherwise. Gradients are float32. A batch is exact if all its inputs are
certified. A certified input is wrong if it is farther than three times its stated error from every sample.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

import spearpp
from benchmarks import command
from benchmarks.recovery import FIRST_SEED
from spearpp import simulate
from spearpp.errors import RankError
from spearpp.inversion.result import Inversion
from spearpp.model.following import ACTIVATIONS, Following
from spearpp.simulate import Batch

EPOCHS = 25
"""Number of epochs of the trained networks."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    activation: str
    m: int
    b: int
    batches: int
    hidden: int = 3
    raw: bool = False
    trained: bool = False
    seconds: float = 60.0


@dataclass(frozen=True)
class Row:
    """What one setting gave."""

    activation: str
    m: int
    hidden: int
    b: int
    data: str
    batches: int
    exact: int
    """Batches of which every visible sample is certified."""
    visible: int
    """Samples that the gradients show."""
    certified: int
    wrong: int
    starts: float
    """Mean number of starts of a batch."""
    seconds: float
    """Median time of a batch."""


SMOOTH = ("gelu", "silu", "elu", "softplus", "leaky_relu", "tanh")
ROWS: dict[str, list[Setting]] = {
    **{name: [Setting(name, 200, b, 50) for b in (20, 60, 90)] for name in SMOOTH},
    "sigmoid": [Setting("sigmoid", 200, 20, 50)],
    "gelu120": [Setting("gelu", 200, 120, 50)],
    "gelu140": [Setting("gelu", 200, 140, 50)],
    "onelayer": [Setting("gelu", 200, b, 50, hidden=1) for b in (60, 90)],
    "relu": [Setting("relu", 200, b, 50) for b in (60, 80)],
    "raw": [Setting("relu", 200, b, 50, raw=True) for b in (60, 80)],
    "m1000": [Setting("gelu", 1000, b, 10) for b in (300, 450, 600)],
    "m4000": [Setting("gelu", 4000, b, n, seconds=300.0) for b, n in ((400, 5), (1200, 3), (2200, 1))],
    "trained": [Setting(name, 200, b, 10, trained=True) for name in ("relu", "gelu") for b in (20, 40, 60, 80)],
}
"""Blocks of rows by name."""
LARGE = ("m1000", "m4000")
"""Blocks that take a GPU."""


def network(setting: Setting, features: int, seed: int) -> nn.Sequential:
    """Return a fresh network."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    width = features
    for _ in range(setting.hidden):
        layers += [nn.Linear(width, setting.m), ACTIVATIONS[setting.activation]()]
        width = setting.m
    return nn.Sequential(*layers, nn.Linear(width, 10))


@cache
def trained(setting: Setting, data: str | None, device: torch.device) -> nn.Sequential:
    """Return a network after training on all images with Adam."""
    images = simulate.cifar10(10_000, path=data)
    inputs, labels = images.inputs.to(device), images.labels.to(device)
    model = network(setting, inputs.shape[1], 0).to(device)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), device=device).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    accuracy = float((model(inputs).argmax(1) == labels).float().mean())
    print(f"# {setting.activation}: {accuracy:.1%} accuracy after {EPOCHS} epochs", flush=True)
    return model


def attack(setting: Setting, seed: int, data: str | None, device: torch.device) -> tuple[Batch, Inversion, float]:
    """Recover one batch. Return the batch, the inversion and the seconds."""
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.cifar10(setting.b, path=data, normalise=not setting.raw, generator=generator)
    batch = Batch(batch.inputs.to(device), batch.labels.to(device), batch.normalisation)
    if setting.trained:
        model = trained(Setting(setting.activation, setting.m, 0, 0, trained=True), data, device)
    else:
        model = network(setting, batch.inputs.shape[1], seed).to(device)
    first, *later = simulate.fedsgd(model, batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    following = Following.of_layers(setting.activation, later)
    size = None if setting.trained else setting.b
    result = spearpp.invert(*first, following=following, seconds=setting.seconds, batch_size=size)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return batch, result, time.perf_counter() - began


def wrong(batch: Batch, result: Inversion) -> int:
    """Count certified inputs that are farther than three times their stated error from every sample."""
    if result.evidence is None or not bool(result.certified.any()):
        return 0
    found, truth = result.inputs[result.certified].double(), batch.inputs.double()
    distance = (torch.cdist(found, truth) / torch.linalg.vector_norm(truth, dim=1)).amin(1)
    return int((distance > 3 * result.evidence.error[result.certified]).sum())


def measure(setting: Setting, batches: int | None, data: str | None, device: torch.device) -> Row:
    """Attack all batches of a setting."""
    exact = visible = certified = mistakes = starts = 0
    times = []
    count = batches or setting.batches
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        try:
            batch, result, seconds = attack(setting, seed, data, device)
        except RankError:  # the gradient does not show a rank below the width of the layer
            times.append(float("nan"))
            continue
        found = int(result.certified.sum())
        exact += found == result.batch_size
        visible, certified, starts = visible + result.batch_size, certified + found, starts + result.stats.starts
        mistakes += wrong(batch, result)
        times.append(seconds)
    kind = "trained" if setting.trained else "raw pixels" if setting.raw else "normalised"
    sizes = (setting.activation, setting.m, setting.hidden, setting.b, kind, count)
    return Row(*sizes, exact, visible, certified, mistakes, starts / count, statistics.median(times))


def rows(names: list[str], batches: int | None, data: str | None, device: torch.device) -> Iterator[Row]:
    """Measure blocks of rows, and print each row."""
    heads = ("activation", "m", "hidden", "b", "data", "exact batches", "certified", "wrong", "starts", "seconds")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    for name in names:
        for setting in ROWS[name]:
            row = measure(setting, batches, data, device)
            cells = (row.activation, row.m, row.hidden, row.b, row.data, f"{row.exact} of {row.batches}")
            more = (f"{row.certified} of {row.visible}", row.wrong, f"{row.starts:.0f}", f"{row.seconds:.3g}")
            print("| " + " | ".join(str(each) for each in (*cells, *more)) + " |", flush=True)
            yield row


def main() -> int:
    """Measure the blocks that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=ROWS, default=[each for each in ROWS if each not in LARGE])
    options.add_argument("--batches", type=int, help="number of batches of each row; default: as in the table")
    given = options.parse_args()
    return command.run(rows(given.rows, given.batches, given.data, given.device), given.out)


if __name__ == "__main__":
    sys.exit(main())
