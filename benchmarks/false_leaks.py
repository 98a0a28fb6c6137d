"""Audits updates that the equations of the network must not explain, and counts the verdict LEAKS.

    make bench NAME=false_leaks                                # 420 updates
    make bench NAME=false_leaks ARGS="--updates 2 --kinds adam"

Each update comes from a fresh 3072-100-100-10 network and 4 to 20 CIFAR-10 test images (SPEARPP_DATA), but it is not
the gradient of the network that the audit is given:

- activation: the network of the client has another activation;
- weights: the network of the client has other weights;
- round: the weights are those before two steps of the server with a learning rate of 1;
- adam: the client sends its weights after three steps of Adam;
- random: all gradients are Gaussian noise;
- low rank: the gradient of every layer is a product of two matrices of Gaussian noise, with the rank of the batch.

Every second audit is given the number of samples. The benchmark fails if an update has the verdict LEAKS.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import spearpp
from benchmarks import command
from benchmarks.equations import network
from spearpp import simulate
from spearpp.model.following import ACTIVATIONS
from spearpp.simulate import Batch, FedSGD
from spearpp.update import ClientUpdate

BUDGET = 20.0
"""Seconds of an audit."""
SMOOTH = [name for name in ACTIVATIONS if name != "relu"]
"""All common activations but ReLU."""


def build(activation: str, seed: int) -> nn.Sequential:
    """Return a fresh network."""
    return network(activation, 3072, [100, 100], seed)


@dataclass(frozen=True)
class Row:
    """What the updates of one kind gave."""

    kind: str
    updates: int
    leaks: int
    """Updates with the verdict LEAKS."""
    fits: int
    """Inputs that are shown as consistent with an update, without a proof."""
    verdicts: str


def stated(model: nn.Module, own: nn.Module, batch: Batch) -> tuple[nn.Module, ClientUpdate]:
    """Return a model, and an update that states the weights of this model and has the gradients of the client's own."""
    gradients = FedSGD()(own, batch).gradients
    return model, ClientUpdate.from_gradients(model, dict(gradients))


def activation(batch: Batch, name: str, seed: int) -> tuple[nn.Module, ClientUpdate]:
    other = SMOOTH[(SMOOTH.index(name) + 1) % len(SMOOTH)]
    return stated(build(name, seed), build(other, seed), batch)


def weights(batch: Batch, name: str, seed: int) -> tuple[nn.Module, ClientUpdate]:
    return stated(build(name, seed), build(name, seed + 1), batch)


def earlier_round(batch: Batch, name: str, seed: int) -> tuple[nn.Module, ClientUpdate]:
    before, after = build(name, seed), build(name, seed)
    optimiser = torch.optim.SGD(after.parameters(), lr=1.0)
    _steps(after, optimiser, batch, 2)
    return stated(before, after, batch)


def adam(batch: Batch, name: str, seed: int) -> tuple[nn.Module, ClientUpdate]:
    before, after = build(name, seed), build(name, seed)
    _steps(after, torch.optim.Adam(after.parameters()), batch, 3)
    return before, ClientUpdate.from_weights(before, after)


def random(batch: Batch, name: str, seed: int, *, low_rank: bool) -> tuple[nn.Module, ClientUpdate]:
    model, generator, b = build(name, seed), torch.Generator().manual_seed(seed), len(batch.inputs)
    gradients = {}
    for parameter, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if low_rank and weight.ndim == 2:
            drawn = drawn[:, :b] @ torch.randn(b, weight.shape[1], generator=generator)
        gradients[parameter] = 1e-3 * drawn
    return model, ClientUpdate.from_gradients(model, gradients)


KINDS: dict[str, Callable[[Batch, str, int], tuple[nn.Module, ClientUpdate]]] = {
    "activation": activation,
    "weights": weights,
    "round": earlier_round,
    "adam": adam,
    "random": partial(random, low_rank=False),
    "low rank": partial(random, low_rank=True),
}
"""Kinds of updates by name: functions from a batch, an activation and a seed to a model and an update."""


def _steps(model: nn.Module, optimiser: torch.optim.Optimizer, batch: Batch, count: int) -> None:
    for _ in range(count):
        optimiser.zero_grad()
        cross_entropy(model(batch.inputs), batch.labels).backward()
        optimiser.step()


def measure(kind: str, updates: int, first: int, data: str | None) -> Row:
    """Audit the updates of one kind: some for each activation."""
    verdicts: Counter[str] = Counter()
    fits = 0
    for name in SMOOTH:
        for seed in range(first, first + updates):
            generator = torch.Generator().manual_seed(seed)
            b = int(torch.randint(4, 21, (), generator=generator))
            batch = simulate.cifar10(b, path=data, generator=generator)
            model, update = KINDS[kind](batch, name, seed)
            result = spearpp.audit(update, model, batch_size=b if seed % 2 else None, budget=BUDGET)
            verdicts[str(result.verdict)] += 1
            fits += sum(str(claim.kind) == "fits" for each in result.layers for claim in each.claims)
            if result.verdict == "LEAKS":
                print(f"# {kind}, {name}, seed {seed}: {result.summary}", file=sys.stderr, flush=True)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return Row(kind, len(SMOOTH) * updates, verdicts["LEAKS"], fits, counts)


def main() -> int:
    """Audit the kinds that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--updates", type=int, default=10, help="updates of each activation and kind; default: 10")
    command.add_first(options)
    given = options.parse_args()
    torch.set_num_threads(1)
    leaks = 0

    def rows() -> Iterator[Row]:
        nonlocal leaks
        for kind in given.kinds:
            row = measure(kind, given.updates, given.first, given.data)
            leaks += row.leaks
            yield row

    return command.run(command.printed(rows()), given.out) or int(leaks > 0)


if __name__ == "__main__":
    sys.exit(main())
