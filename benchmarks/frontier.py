"""Measures the largest batch that is recovered from the gradient of one layer and of two layers, by layer width.

    make bench NAME=frontier                                        # all rows that are feasible on this device
    make bench NAME=frontier ARGS="--rows raw m1000 --batches 20"
    make bench NAME=frontier ARGS="--rows weights"                  # effect of the parameters α and β of reflections
    make bench NAME=frontier ARGS="--rows trained"                  # a network with 95 % training accuracy
    make bench NAME=frontier ARGS="--rows peel64 peel256"           # the setting of LT-code peeling (2026)

The data are CIFAR-10 test images (SPEARPP_DATA), normalised or as raw pixels. Each batch has its own seed (1000, 1001,
...) and a fresh 3072-m-m-m-10 network. Gradients are float32.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import spearpp
from benchmarks import command
from benchmarks.recovery import FIRST_SEED, Setting, attack, measure
from spearpp import simulate
from spearpp.experiments.attack import WRONG_PSNR
from spearpp.experiments.reproduce import Result
from spearpp.inversion.next_layer import read_next_layer
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import pose
from spearpp.linalg import sphere
from spearpp.search import Gated
from spearpp.search.gated.two_layers import reflect

ALPHAS = (1.0, 1.4, 2.0, 3.0, 5.0, 8.0)
"""Values of α in ``--rows weights``."""

TARGETS = {
    "m200": [(200, 60, "98 %", 50), (200, 80, "90 %", 50), (200, 90, "0.45 m", 50), (200, 95, "-", 10)],
    "raw": [(200, 20, "99 %", 50), (200, 40, "95 %", 50), (200, 80, "-", 20), (200, 90, "0.45 m", 20)],
    "m500": [(500, 200, "-", 10), (500, 225, "0.45 m", 10), (500, 235, "-", 5)],
    "m1000": [(1000, 250, "98 %", 20), (1000, 300, "90 %", 20), (1000, 400, "half", 10), (1000, 450, "0.45 m", 10)],
    "m2000": [(2000, 800, "-", 5), (2000, 900, "0.45 m", 5)],
    "m4000": [(4000, 800, "all", 5), (4000, 1200, "most", 5)],
    "m4000far": [(4000, 1600, "-", 1), (4000, 1800, "0.45 m", 1)],
    "one": [
        (200, 50, "0.25 m", 20),
        (200, 55, "-", 20),
        (200, 60, "-", 20),
        (500, 100, "-", 10),
        (500, 125, "0.25 m", 10),
    ],
    "onefar": [(1000, 225, "-", 5), (1000, 250, "0.25 m", 5), (2000, 400, "-", 3), (4000, 800, "-", 3)],
    "oneraw": [(200, 20, "95 %", 20), (200, 25, "-", 20), (200, 30, "-", 20), (200, 35, "-", 20)],
}
"""Blocks of rows: (m, b, target, batches) with the layer width, the batch size and the share of batches to reach."""


def rows(name: str) -> list[Setting]:
    """Return the settings of one block of rows."""
    one = name.startswith("one")
    raw = name.endswith("raw")
    label = f"{'one layer' if one else 'two layers'}{', raw' if raw else ''}"
    return [
        Setting(label, b, m, Gated(), aim, batches=batches, layers_used=1 if one else 2, raw=raw)
        for m, b, aim, batches in TARGETS[name]
    ]


def weights(data: str | None, device: torch.device) -> None:
    """Print how many of 64 starts reach an input, and in parentheses how many inputs they reach, by α and β."""
    print("\n    m    b  reflections theta " + "".join(f"{'alpha ' + format(a, 'g'):>12}" for a in ALPHAS))
    for m, b, steps in ((200, 75, 1600), (200, 90, 1600), (1000, 150, 400), (1000, 400, 800)):
        batch, (seen, following, *_) = attack(Setting("weights", b, m, Gated()), data).prepare(FIRST_SEED, device)
        problem = pose(observe(*seen), batch_size=b)
        next_layer = read_next_layer(following.grad_weight, following.weight, problem.preactivations).next_layer
        assert next_layer is not None
        inputs = torch.cat([batch.inputs.double(), torch.ones(b, 1)], dim=1).to(device)
        span = torch.linalg.qr(problem.preactivations)[0]
        truth = sphere.retract(inputs @ torch.linalg.pinv(problem.factors.right) @ problem.preactivations.T) @ span
        for theta in (0.5, 1.0, 1.4):
            cells = []
            for alpha in ALPHAS:
                starts = sphere.uniform(64, b, torch.Generator().manual_seed(0), device=device)
                bases = span.float(), next_layer.activations.float()
                ends, _ = reflect(*bases, starts, steps, alpha=alpha, theta=theta)
                cosine, which = (ends.double() @ truth.T).max(1)
                hit = cosine > 0.99  # the angle to the input is below about 8 degrees
                cells.append(f"{int(hit.sum()):>7} ({len(which[hit].unique())})".rjust(12))
            print(f"{m:>5}{b:>5}{steps:>13}{theta:>6} " + "".join(cells), flush=True)


@dataclass(frozen=True)
class Peeled:
    """Results of one batch in the setting of LT-code peeling."""

    b: int
    seed: int
    visible: int
    """Number of samples whose gradient is above ``VISIBLE``."""
    recovered: int
    """Number of inputs with a PSNR above 60 dB, certified or not."""
    certified: int
    wrong: int
    """Number of certified inputs with a PSNR of at most 60 dB."""
    seconds: float
    published: float
    """Share of inputs that LT-code peeling recovers, as published."""


PUBLISHED = {64: 0.99, 128: 0.67, 256: 0.22}
"""Share of inputs that LT-code peeling recovers, by batch size, as published."""
VISIBLE = 1e-12
"""Smallest gradient of the loss with respect to the outputs at which a sample counts as visible.

Design choice between two values: samples that are classified correctly have a gradient of at most 1e-24, and the
rounding of float64 is about 1e-16 of the other gradients.
"""


def peeling(b: int, batches: int, data: str | None, device: torch.device) -> Iterator[Peeled]:
    """Measure the setting of LT-code peeling.

    Inputs are pixels in [0, 1]. The network has one hidden layer of 1000 neurons, weights from N(0, 0.5²), biases of
    zero and float64 numbers. The softmax saturates: a sample that is classified correctly has a gradient of at most
    1e-24, far below the rounding of the other gradients, and cannot be recovered.
    """
    for index in range(batches):
        generator = torch.Generator().manual_seed(FIRST_SEED + index)
        batch = simulate.cifar10(b, path=data, normalise=False, generator=generator)
        model = simulate.mlp(3072, [1000], 10, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                spread = 0.5 if parameter.ndim == 2 else 0.0
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        model = model.to(device)
        outputs = torch.softmax(model(batch.inputs.to(device).double()), dim=1).detach().cpu()
        loss = torch.linalg.vector_norm(outputs - torch.nn.functional.one_hot(batch.labels, 10), dim=1)
        visible = int((loss > VISIBLE).sum())
        seen, following = simulate.fedsgd(model, batch)
        began = time.perf_counter()
        result = spearpp.invert(
            *seen,
            next_grad_weight=following.grad_weight,
            next_weight=following.weight,
            search=Gated(seconds=600),
            generator=torch.Generator().manual_seed(FIRST_SEED + index),
        )
        seconds = time.perf_counter() - began
        near = torch.tensor([float(spearpp.score(x[None], batch.inputs).psnr.max()) for x in result.inputs])
        right, certified = int((near > WRONG_PSNR).sum()), result.certified.cpu()
        wrong = int((near[certified] <= WRONG_PSNR).sum())
        yield Peeled(b, FIRST_SEED + index, visible, right, int(certified.sum()), wrong, seconds, PUBLISHED[b])


@dataclass(frozen=True)
class Trained:
    """Results of one batch size with a trained network."""

    b: int
    layers_used: int
    """Number of layers whose gradients the attack uses."""
    batches: int
    inputs: int
    below_noise: int
    """Number of inputs that are missing in the numerical rank of the gradient."""
    certified: int
    wrong: int
    median_seconds: float


def trained(batches: int, data: str | None, device: torch.device) -> Iterator[Trained]:
    """Measure a 3072-200-200-200-10 network that was trained until it classifies 95 % of 2,000 images correctly.

    The more confident the network is about a sample, the smaller is its gradient. The singular values then span ten
    orders of magnitude, and the gradients of some samples are below the rounding of the others.
    """
    generator = torch.Generator().manual_seed(0)
    known = simulate.cifar10(2000, path=data, generator=generator)
    model = simulate.mlp(3072, [200, 200, 200], 10, generator=generator).to(device)
    inputs, labels = known.inputs.to(device), known.labels.to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    accuracy, epochs = 0.0, 0
    while accuracy < 0.95:
        for part in torch.randperm(len(inputs), generator=generator).to(device).split(100):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
            optimiser.step()
        accuracy, epochs = float((model(inputs).argmax(1) == labels).float().mean()), epochs + 1
    print(f"\ntrained for {epochs} epochs, correct on {accuracy:.1%} of 2,000 images")
    for b in (20, 40, 60, 80):
        for layers_used in (1, 2):
            below, certified, wrong, seconds = 0, 0, 0, []
            for seed in range(FIRST_SEED, FIRST_SEED + batches):
                rows = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))[:b]
                batch = known.pick(rows)
                seen, following, *_ = simulate.fedsgd(model, batch)
                began = time.perf_counter()
                result = spearpp.invert(
                    *seen,
                    next_grad_weight=following.grad_weight if layers_used == 2 else None,
                    next_weight=following.weight if layers_used == 2 else None,
                    search=Gated(seconds=60),
                    generator=torch.Generator().manual_seed(seed),
                )
                seconds.append(time.perf_counter() - began)
                below += b - result.batch_size
                certified += int(result.certified.sum())
                nearest = partial(spearpp.score, truth=batch.inputs, normalisation=batch.normalisation)
                wrong += sum(float(nearest(x[None]).psnr.max()) < WRONG_PSNR for x in result.inputs[result.certified])
            yield Trained(b, layers_used, batches, b * batches, below, certified, wrong, statistics.median(seconds))


PEELING_ROWS = {f"peel{b}": b for b in PUBLISHED}


def main() -> int:
    parser = command.parser(__doc__)
    blocks = list(TARGETS) if torch.cuda.is_available() else ["m200", "raw", "m500", "one", "oneraw"]
    parser.add_argument("--rows", nargs="+", choices=[*TARGETS, "weights", "trained", *PEELING_ROWS], default=blocks)
    parser.add_argument("--batches", type=int, help="largest number of batches; default: the number of each row")
    options = parser.parse_args()
    return command.run(_rows(options), options.out)


def _rows(options: argparse.Namespace) -> Iterator[Result | Peeled | Trained]:
    for name in options.rows:
        if name == "weights":
            weights(options.data, options.device)
        elif name == "trained":
            yield from command.printed(trained(options.batches or 10, options.data, options.device))
        elif name in PEELING_ROWS:
            batches = options.batches or 20
            yield from command.printed(peeling(PEELING_ROWS[name], batches, options.data, options.device))
        else:
            yield from measure(rows(name), options.batches, options.data, options.device)


if __name__ == "__main__":
    sys.exit(main())
