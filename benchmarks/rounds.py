"""Measures what several rounds of one client give together.

    make bench NAME=rounds                                     # all rows of layers with 100 and 200 neurons
    make bench NAME=rounds ARGS="--rows relu100 --clients 5"
    make bench NAME=rounds ARGS="--rows relu1000 --device cuda"

The data are CIFAR-10 test images (SPEARPP_DATA). Each client has its own seed (1000, 1001, …) and a fresh
3072-m-10 network. After every round the server subtracts 0.1 times the client's gradient from the weights, or takes
the weights of a client with local steps. A client is exact if every sample that its row asks for is certified by the
joined rounds. A certified input is wrong if it is farther than three times its stated error from every sample.
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import command
from benchmarks.equations import network
from spearpp import simulate
from spearpp.auditing.plan import make_plan
from spearpp.auditing.rounds import first_layer
from spearpp.auditing.rounds.joined import Joined, join_rounds
from spearpp.auditing.task import Task
from spearpp.simulate import Batch, Client
from spearpp.update import ClientUpdate

RATE = 0.1
"""Learning rate of the server."""
EXACT_DB = 90.0
"""Smallest signal-to-noise ratio of an input of a client with local steps."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    activation: str
    m: int
    rounds: int
    b: int
    clients: int = 20
    client: Client = simulate.FedSGD()
    new: float = 0.0
    """Share of the samples that is new in each round; 1 for other data in each round."""
    at_least: int = 1
    """Number of rounds that a sample must take part in to be asked for."""
    seconds: float = 120.0


@dataclass(frozen=True)
class Row:
    """What one setting gave."""

    activation: str
    m: int
    rounds: int
    b: int
    kind: str
    clients: int
    exact: int
    """Clients all of whose samples were recovered."""
    asked: int
    """Samples that the row asks for."""
    recovered: int
    """Of these, samples that were recovered."""
    wrong: int
    """Recovered inputs that are no samples."""
    seconds: float
    """Median time of a client."""


LOCAL = simulate.FedAvg(epochs=1, mini_batch=20, rate=0.01)
ROWS: dict[str, list[Setting]] = {
    "relu100": [Setting("relu", 100, 3, 40), Setting("relu", 100, 8, 120)],
    "relu200": [Setting("relu", 200, 4, 150), Setting("relu", 200, 8, 300, seconds=300.0)],
    "relu1000": [Setting("relu", 1000, 4, 800, clients=5, seconds=300.0)],
    "gelu": [Setting("gelu", 100, 4, 100)],
    "fedavg": [Setting("relu", 100, 8, 120, client=LOCAL)],
    "partly": [Setting("relu", 100, 6, 60, new=0.2, at_least=3)],
    "other": [Setting("relu", 100, 6, 60, clients=50, new=1.0, seconds=30.0)],
}
"""Blocks of rows by name."""
LARGE = ("relu1000",)
"""Blocks that take a GPU."""


def batches_of(setting: Setting, seed: int, data: str | None) -> tuple[Batch, list[list[int]]]:
    """Return all samples of a client, and the indices of those that it trains on in each round."""
    new = round(setting.new * setting.b)
    total = setting.b + new * (setting.rounds - 1)
    samples = simulate.cifar10(total, path=data, generator=torch.Generator().manual_seed(seed))
    return samples, [list(range(new * index, new * index + setting.b)) for index in range(setting.rounds)]


def attack(
    setting: Setting, seed: int, data: str | None, device: torch.device
) -> tuple[Batch, list[list[int]], Joined, float]:
    """Join the rounds of one client. Return its samples, their rounds, what was found and the seconds."""
    samples, rounds = batches_of(setting, seed, data)
    model = network(setting.activation, samples.inputs.shape[1], [setting.m], seed).to(device)
    batches = [
        Batch(samples.inputs[rows].to(device), samples.labels[rows].to(device), samples.normalisation)
        for rows in rounds
    ]
    rate = setting.client.rate if isinstance(setting.client, simulate.FedAvg) else RATE
    updates = simulate.play_rounds(model, setting.client, batches, rate=rate)
    began = time.perf_counter()
    joined = audit(updates, model, setting.seconds)
    return samples, rounds, joined, time.perf_counter() - began


def audit(updates: list[ClientUpdate], model: nn.Module, seconds: float) -> Joined:
    """Join the rounds in the first layer."""
    layer = first_layer([make_plan(each, Task(model, memory=None)) for each in updates])
    if layer is None:
        raise ValueError("the network has no layer that can be inverted")
    return join_rounds(layer, dict(enumerate(updates)), Task(model, budget=seconds))


def judge(setting: Setting, samples: Batch, rounds: list[list[int]], joined: Joined) -> tuple[int, int, int]:
    """Return how many samples the row asks for, how many of them were recovered, and how many inputs are wrong."""
    asked = [row for row in range(len(samples.inputs)) if sum(row in each for each in rounds) >= setting.at_least]
    if joined.audited is None or not bool(joined.audited.is_recovered.any()):
        return len(asked), 0, 0
    truth = samples.inputs.double()
    found = joined.audited.inputs.cpu().double()
    distances = torch.cdist(found, truth) / torch.linalg.vector_norm(truth, dim=1)
    stated = torch.tensor([each.error for each in joined.audited.claims if each.recovered])
    local = not isinstance(setting.client, simulate.FedSGD)
    close = 10 ** (-EXACT_DB / 20) if local else 1e-3
    recovered = (distances[:, asked] <= close).any(0)
    return len(asked), int(recovered.sum()), int((distances.amin(1) > 3 * stated).sum())


def measure(setting: Setting, clients: int | None, first: int, data: str | None, device: torch.device) -> Row:
    """Attack all clients of a setting."""
    exact = asked = recovered = wrong = 0
    times = []
    count = clients or setting.clients
    for seed in range(first, first + count):
        samples, rounds, joined, seconds = attack(setting, seed, data, device)
        wanted, got, mistakes = judge(setting, samples, rounds, joined)
        exact, asked, recovered, wrong = exact + (got == wanted), asked + wanted, recovered + got, wrong + mistakes
        times.append(seconds)
    kind = type(setting.client).__name__ + (f", {setting.new:.0%} new" if setting.new else "")
    sizes = (setting.activation, setting.m, setting.rounds, setting.b, kind, count)
    return Row(*sizes, exact, asked, recovered, wrong, statistics.median(times))


def main() -> int:
    """Measure the blocks that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=ROWS, default=[each for each in ROWS if each not in LARGE])
    options.add_argument("--clients", type=int, help="number of clients of each row; default: as in the table")
    command.add_first(options)
    given = options.parse_args()
    settings = (setting for name in given.rows for setting in ROWS[name])
    rows = (measure(setting, given.clients, given.first, given.data, given.device) for setting in settings)
    return command.run(command.printed(rows), given.out)


if __name__ == "__main__":
    sys.exit(main())
