"""Measures the cost of audits in a Flower federation: time, memory, and audits that are dropped under load.

    make bench NAME=federation
    make bench NAME=federation ARGS="--clients 50 --rounds 12"

A Flower strategy and client apps run in one process. A round then consists only of training and of Flower's own work,
so the relative cost of audits is as large as possible. The audit worker is a second process on the same cores.
"""

import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import nn

from benchmarks import command
from benchmarks.grid import InProcess
from spearpp import simulate
from spearpp.integrations.flower import AuditStrategy


@dataclass(frozen=True)
class Row:
    """Results of one kind of federation."""

    audits: str
    clients: int
    rounds: int
    rounds_a_minute: float
    ratio: float
    """Rounds per minute, divided by those without audits. Both are medians of the repeats."""
    cpu_ratio: float
    """CPU time per round of the server process, divided by that without audits. Other processes do not change it."""
    aggregate_ms: float
    """Median time in which the strategy aggregates the replies of a round and submits audits."""
    done: int
    """Number of audits that were run."""
    dropped: int
    """Number of audits that were dropped because the queue was full."""
    server_mebibytes: float
    """Peak resident memory of the server process so far."""
    worker_mebibytes: float
    """Peak resident memory of the audit worker; 0 if there is none."""
    same_model: bool
    """Whether the trained model is identical to the one without audits."""


def net() -> nn.Sequential:
    """Return the network at the start of training."""
    return simulate.mlp(3072, [200, 200], 10, generator=torch.Generator().manual_seed(3))


app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train for one epoch of two steps on a client's batch of 16 images, like Flower's quickstart but smaller."""
    model = net()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    batch = simulate.photographs(16, generator=torch.Generator().manual_seed(context.node_id))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for rows in torch.arange(16).split(8):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs[rows]), batch.labels[rows]).backward()
        optimiser.step()
    arrays = ArrayRecord({name: Array(each.numpy()) for name, each in model.state_dict().items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 16})}), reply_to=message)


def peak(process: int) -> float:
    """Return the peak resident memory of a process in MiB (Linux only)."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


class Loop(InProcess):
    """Runs all clients one after another in this process, and records times."""

    def __init__(self, clients: int) -> None:
        super().__init__(clients)
        self.worker, self.ends, self.cpu = 0.0, [time.monotonic()], [time.process_time()]
        self.replied_at: float | None = None
        self.aggregating: list[float] = []
        self.strategy: Strategy | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        if self.replied_at is not None:
            self.aggregating.append(time.monotonic() - self.replied_at)
        replies = []
        for each in sorted(messages, key=lambda each: each.metadata.dst_node_id):
            node = each.metadata.dst_node_id
            replies.append(app(each, Context(1, node, {}, RecordDict(), {})))
        if isinstance(self.strategy, AuditStrategy) and self.strategy.auditor.worker is not None:
            self.worker = max(self.worker, peak(self.strategy.auditor.worker))
        if replies:
            self.ends.append(time.monotonic())
            self.cpu.append(time.process_time())
        self.replied_at = self.ends[-1] if replies else None
        return replies


@dataclass(frozen=True)
class Run:
    """Measurements of one federation."""

    seconds: float
    cpu: float
    aggregate: float
    done: int
    dropped: int
    worker: float
    model: dict[str, bytes]


def run(strategy: Strategy, clients: int, rounds: int) -> Run:
    """Run one federation."""
    grid = Loop(clients)
    grid.strategy = strategy
    initial = ArrayRecord({key: Array(each.numpy()) for key, each in net().state_dict().items()})
    config = ConfigRecord({"lr": 0.01, "momentum": 0.9})
    result = strategy.start(grid, initial, num_rounds=rounds, train_config=config)
    auditor = strategy.auditor if isinstance(strategy, AuditStrategy) else None
    return Run(
        seconds=(grid.ends[-1] - grid.ends[1]) / (rounds - 1),  # without the first round, which warms up
        cpu=(grid.cpu[-1] - grid.cpu[1]) / (rounds - 1),
        aggregate=statistics.median(grid.aggregating),
        done=0 if auditor is None else len(auditor.outcomes),
        dropped=0 if auditor is None else auditor.dropped,
        worker=grid.worker,
        model={key: each.numpy().tobytes() for key, each in result.arrays.items()},
    )


def rows(clients: list[int], rounds: int, repeats: int) -> Iterable[Row]:
    """Measure all kinds of federations, in turns, so that other load on the machine affects all kinds alike."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("spearpp.integrations").setLevel(logging.CRITICAL)
    kinds: dict[str, int | None] = {"none": 0, "one a round": 1, "every reply": None}
    for count in clients:
        runs: dict[str, list[Run]] = {name: [] for name in kinds}
        for _ in range(repeats):
            for name, sample in kinds.items():
                with tempfile.TemporaryDirectory() as out:
                    audited = AuditStrategy(fedavg(), sample=sample, budget=3.0, out=out)
                    runs[name].append(run(fedavg() if name == "none" else audited, count, rounds))
        base = runs["none"]
        yield from (summarised(name, count, rounds, base, each) for name, each in runs.items())


def summarised(name: str, clients: int, rounds: int, base: list[Run], runs: list[Run]) -> Row:
    """Return the row of one kind."""

    def median(of: list[Run], what: str) -> float:
        return statistics.median(getattr(each, what) for each in of)

    return Row(
        audits=name,
        clients=clients,
        rounds=rounds * len(runs),
        rounds_a_minute=60 / median(runs, "seconds"),
        ratio=median(base, "seconds") / median(runs, "seconds"),
        cpu_ratio=median(runs, "cpu") / median(base, "cpu"),
        aggregate_ms=1000 * median(runs, "aggregate"),
        done=sum(each.done for each in runs),
        dropped=sum(each.dropped for each in runs),
        server_mebibytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        worker_mebibytes=max(each.worker for each in runs),
        same_model=all(each.model == base[0].model for each in runs),
    )


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    return command.run(command.printed(rows(given.clients, given.rounds, given.repeats)), given.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
