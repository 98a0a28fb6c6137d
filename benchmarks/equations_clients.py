"""Measures what the equations of the network recover after local training and from noisy gradients.

    make bench NAME=equations_clients                                     # FedAvg: 50 updates; noise: 10 updates each
    make bench NAME=equations_clients ARGS="--rows noise1e-5 --batches 2"

The data are CIFAR-10 test images (SPEARPP_DATA) and a fresh 3072-200-200-200-10 network with GELU for each seed (1000,
1001, ...). Every update goes through ``spearpp.audit``. The signal-to-noise ratio compares the error of an input with
the norm of its sample. An input is wrong if it is farther than three times its stated error from every sample.

For noisy gradients the reference is a Gauss-Newton fit of all inputs to the gradients of all layers, started at the
true inputs and with the true labels: the best that least squares can do with this noise.
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call, grad

import spearpp
from benchmarks import command
from benchmarks.equations import network
from spearpp import simulate
from spearpp.auditing.refine import least_squares
from spearpp.simulate import Batch
from spearpp.types import Float, Tensor
from spearpp.update import ClientUpdate

SIZE = 20
"""Number of samples of each update."""
GOAL = 60.0
"""Signal-to-noise ratio, in dB, over which every sample of a FedAvg update must be."""
CLIENTS: dict[str, tuple[simulate.Client, int]] = {
    "fedavg": (simulate.FedAvg(epochs=3, mini_batch=5, rate=0.01), 50),
    "noise1e-6": (simulate.DPSGD(clip=1e9, noise=1e-6), 10),
    "noise1e-5": (simulate.DPSGD(clip=1e9, noise=1e-5), 10),
}
"""Clients by name of the row, with their number of updates."""


@dataclass(frozen=True)
class Row:
    """What one client gave."""

    client: str
    updates: int
    whole: int
    """Updates of which every sample was recovered over the goal."""
    recovered: int
    """Recovered inputs: certified or approximate."""
    certified: int
    wrong: int
    lowest: float
    """Lowest signal-to-noise ratio of a recovered input, in dB."""
    median: float
    reference: float | None
    """Mean difference between the ratios of the reference and of the recovered inputs, in dB."""
    seconds: float
    """Median time of an audit."""


def client_update(name: str, seed: int, data: str | None) -> tuple[nn.Module, Batch, ClientUpdate]:
    """Return network, batch and update of one seed."""
    batch = simulate.cifar10(SIZE, path=data, generator=torch.Generator().manual_seed(seed))
    model = network("gelu", batch.inputs.shape[1], [200] * 3, seed)
    return model, batch, CLIENTS[name][0](model, batch, torch.Generator().manual_seed(seed))


def ratios(found: Float[Tensor, "k n"], truth: Float[Tensor, "b n"]) -> tuple[Tensor, Tensor]:
    """Return the signal-to-noise ratio of each input in dB, and the sample that is closest to it."""
    distance = torch.cdist(found.double(), truth.double()) / torch.linalg.vector_norm(truth.double(), dim=1)
    nearest = distance.min(1)
    return -20 * nearest.values.log10(), nearest.indices


def best_fit(model: nn.Module, batch: Batch, update: ClientUpdate) -> Float[Tensor, "b n"]:
    """Fit all inputs to the gradients by Gauss-Newton steps from the truth."""
    model = model.double()
    weights = {name: each.detach() for name, each in model.named_parameters()}
    observed = {name: update.gradients[name].double() for name in weights}

    def gradients(inputs: Tensor) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(functional_call(model, parameters, (inputs,)), batch.labels)

        return grad(loss)(weights)

    return least_squares(gradients, observed, batch.inputs.double())


def measure(name: str, batches: int | None, first: int, data: str | None) -> Row:
    """Audit all updates of a client."""
    count = batches or CLIENTS[name][1]
    whole = recovered = certified = wrong = 0
    found_ratios: list[float] = []
    behind: list[float] = []
    times = []
    for seed in range(first, first + count):
        model, batch, update = client_update(name, seed, data)
        began = time.perf_counter()
        layer = spearpp.audit(update, model, batch_size=SIZE).layers[0]
        times.append(time.perf_counter() - began)
        if layer.inversion is None or not len(layer.inputs):
            print(f"# {name}, seed {seed}: nothing; {layer.reason}", file=sys.stderr, flush=True)
            continue
        kept = torch.tensor([claim.recovered for claim in layer.claims])
        stated = torch.tensor([claim.error for claim in layer.claims])[kept]
        decibels, nearest = ratios(layer.inversion.inputs[kept], batch.inputs)
        recovered, certified = recovered + int(kept.sum()), certified + sum(each.certified for each in layer.claims)
        wrong += int((10 ** (-decibels / 20) > 3 * stated).sum())
        whole += len(set(nearest[decibels > GOAL].tolist())) == SIZE
        found_ratios += decibels.tolist()
        if update.kind == "gradients":
            reference = ratios(best_fit(model, batch, update), batch.inputs)[0]
            behind += (reference[nearest] - decibels).tolist()
        print(
            f"# {name}, seed {seed}: {int(kept.sum())} recovered, {decibels.min():.1f} dB", file=sys.stderr, flush=True
        )
    middle = statistics.median(found_ratios) if found_ratios else float("nan")
    lowest = min(found_ratios, default=float("nan"))
    difference = statistics.mean(behind) if behind else None
    seconds = statistics.median(times)
    return Row(name, count, whole, recovered, certified, wrong, lowest, middle, difference, seconds)


def main() -> int:
    """Measure the clients that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    options.add_argument("--batches", type=int, help="number of updates of each client; default: as in the table")
    command.add_first(options)
    given = options.parse_args()
    rows = (measure(name, given.batches, given.first, given.data) for name in given.rows)
    return command.run(command.printed(rows), given.out)


if __name__ == "__main__":
    sys.exit(main())
