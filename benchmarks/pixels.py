"""Measures how many pictures an audit recovers through convolutions, ReLU and max-pooling.

    make bench NAME=pixels ARGS="--device cuda"                       # all rows, on a GPU
    make bench NAME=pixels ARGS="--rows fedavg8 --batches 2"          # within minutes on two CPU cores

The networks have two 5x5 convolutions with padding (32 and 64 channels), each followed by ReLU and 2x2 max-pooling, and
one hidden Linear layer: the CNN of the FedAvg paper (hidden layer of 512, 10 classes), the CNN of LEAF for FEMNIST
(2,048, 62 classes), and the first one for pictures of 3x32x32. The data are CIFAR-10 test images (SPEARPP_DATA),
normalised; for 28x28 networks, the grey centre of the image. Each batch has its own seed (1000, 1001, ...) and a fresh
network, unless the row says "trained". The update is one float32 gradient, computed on the CPU.

A batch counts if every picture of it is recovered with more than 60 dB, on the [0, 1] scale. A picture is wrong if it
is claimed and farther than its stated error from every sample. What was missed, and why, goes to standard error.
"""

import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

import spearpp
from benchmarks import command
from spearpp import AuditResult, simulate
from spearpp.model import Sees
from spearpp.types import Tensor

EPOCHS = 5
"""Number of epochs of the trained networks."""
OPTIMISERS = {"sgd": (torch.optim.SGD, 0.05), "adam": (torch.optim.Adam, 1e-3)}
"""Optimisers of the trained networks by name, with their learning rate."""
DECIBELS = 60.0
"""Peak signal-to-noise ratio above which a picture counts."""
GREY_MEAN, GREY_STD = 0.48, 0.24
"""Mean and standard deviation of grey CIFAR-10 images, rounded."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    b: int
    side: int = 28
    channels: int = 1
    hidden: int = 512
    classes: int = 10
    trained: str = ""
    """The optimiser of a trained network; an empty string for a fresh network."""


@dataclass(frozen=True)
class Row:
    """What one setting gave."""

    name: str
    b: int
    batches: int
    exact: int
    """Batches of which every picture has more than 60 dB."""
    features: int
    """Samples whose features are claimed."""
    pictures: int
    """Pictures that are claimed."""
    wrong: int
    """Claimed pictures that are farther than their stated error from every sample."""
    decibels: float
    """Median over all claimed pictures."""
    equations: float
    """Median number of equations, over all claimed pictures."""
    unknowns: int
    search: float
    """Median seconds of an audit."""


ROWS = {
    "fedavg8": Setting("FedAvg CNN 28x28", 8),
    "fedavg16": Setting("FedAvg CNN 28x28", 16),
    "fedavg32": Setting("FedAvg CNN 28x28", 32),
    "trained": Setting("FedAvg CNN 28x28, trained with SGD", 16, trained="sgd"),
    "adam": Setting("FedAvg CNN 28x28, trained with Adam", 16, trained="adam"),
    "leaf32": Setting("LEAF FEMNIST CNN", 32, hidden=2048, classes=62),
    "leaf100": Setting("LEAF FEMNIST CNN", 100, hidden=2048, classes=62),
    "cifar16": Setting("CNN 3x32x32", 16, side=32, channels=3),
    "cifar-trained": Setting("CNN 3x32x32, trained", 16, side=32, channels=3, trained="sgd"),
}
"""Rows by name."""


def network(setting: Setting, seed: int) -> nn.Sequential:
    """Return a fresh network with PyTorch's initialisation."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(setting.channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * (setting.side // 4) ** 2, setting.hidden), nn.ReLU()),
        nn.Linear(setting.hidden, setting.classes),
    )


def pictures(setting: Setting, count: int, seed: int, data: str | None) -> tuple[Tensor, Tensor]:
    """Draw normalised pictures, (count, channels, side, side), and labels."""
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.cifar10(count, path=data, normalise=setting.channels == 3, generator=generator)
    images = batch.inputs.reshape(count, 3, 32, 32)
    if setting.channels == 1:
        images = (images.mean(1, keepdim=True) - GREY_MEAN) / GREY_STD
    margin = (32 - setting.side) // 2
    images = images[:, :, margin : margin + setting.side, margin : margin + setting.side]
    labels = batch.labels if setting.classes == 10 else torch.randint(setting.classes, (count,), generator=generator)
    return images, labels


@cache
def trained(setting: Setting, data: str | None, device: torch.device) -> nn.Sequential:
    """Return a network after training on all images."""
    inputs, labels = (each.to(device) for each in pictures(setting, 10_000, 0, data))
    model = network(setting, 0).to(device)
    kind, rate = OPTIMISERS[setting.trained]
    optimiser = kind(model.parameters(), rate)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), device=device).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    print(f"# {float((model(inputs).argmax(1) == labels).float().mean()):.1%} accuracy after {EPOCHS} epochs")
    return model.cpu()


def psnr(found: Tensor, truth: Tensor, setting: Setting) -> Tensor:
    """Return the peak signal-to-noise ratio of every pair of rows, on the [0, 1] scale."""
    deviation = torch.tensor([GREY_STD] if setting.channels == 1 else simulate.data.CIFAR10_STD, dtype=found.dtype)
    scale = deviation.repeat_interleave(setting.side**2)
    return -20 * torch.log10(torch.cdist(found * scale, truth * scale).clamp_min(1e-300) / len(scale) ** 0.5)


def missed(b: int, result: AuditResult) -> str:
    """Return what an audit recovered, and why the rest is missing: features without a claim, or without a picture."""
    lines = [f"{result.summary} ({result.seconds:.0f} s)"]
    for each in result.layers:
        if each.claims and len(each.inputs) < b:
            lines.append(f"  {each.layer.name}: {len(each.inputs)} of {b}; {each.reason}")
            reasons = Counter(claim.why for claim in each.claims if not claim.recovered)
            lines += [f"    {count} not claimed: {why}" for why, count in reasons.items()]
    return "\n".join(lines)


def measure(setting: Setting, seeds: range, budget: float, data: str | None, device: torch.device) -> Row:
    """Audit all batches of a setting."""
    exact = features = claimed = wrong = 0
    decibels, equations, times = [], [], []
    for seed in seeds:
        inputs, labels = pictures(setting, setting.b, seed, data)
        model = trained(setting, data, device) if setting.trained else network(setting, seed)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        update = spearpp.ClientUpdate.from_gradients(model, list(gradients)).to(device)
        result = spearpp.audit(update, model, batch_size=setting.b, budget=budget)
        times.append(result.seconds)
        features += max(len(each.inputs) for each in result.layers)
        best, truth = result.best, inputs.flatten(1).double()
        found, errors = truth[:0], truth.new_zeros(0)
        if best is not None and best.layer.sees == Sees.INPUTS_FROM_FEATURES and best.inversion is not None:
            found = result.inputs.double().cpu()
            errors = torch.tensor([best.claims[row].error for row in result.rows.tolist()], dtype=torch.float64)
            if best.inversion.evidence is not None:
                equations += best.inversion.evidence.details["equations"][result.rows].tolist()
        reached = psnr(found, truth, setting)
        distance = torch.cdist(found, truth) / torch.linalg.vector_norm(truth, dim=1)
        far = int((distance.amin(1) > errors).sum())
        claimed, wrong = claimed + len(found), wrong + far
        exact += len(found) > 0 and bool((reached.amax(0) > DECIBELS).all())
        decibels += reached.amax(1).tolist()
        print(
            f"seed {seed}: {len(found)} pictures, {far} wrong. {missed(setting.b, result)}", file=sys.stderr, flush=True
        )
    middle = [statistics.median(each) if each else float("nan") for each in (decibels, equations, times)]
    unknowns = setting.channels * setting.side**2
    counts = (setting.name, setting.b, len(seeds), exact, features, claimed, wrong)
    return Row(*counts, middle[0], middle[1], unknowns, middle[2])


def main() -> int:
    """Measure the rows that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=ROWS, default=[each for each in ROWS if each != "fedavg8"])
    options.add_argument("--batches", type=int, default=20, help="number of batches of each row")
    options.add_argument("--budget", type=float, default=300.0, help="seconds for each audit")
    command.add_first(options)
    given = options.parse_args()
    seeds = range(given.first, given.first + given.batches)
    rows = (measure(ROWS[name], seeds, given.budget, given.data, given.device) for name in given.rows)
    return command.run(command.printed(rows), given.out)


if __name__ == "__main__":
    sys.exit(main())
