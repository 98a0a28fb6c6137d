"""What audits cost a Flower federation: time, memory, and what is dropped under load.

    make bench NAME=federation
    make bench NAME=federation ARGS="--clients 50 --rounds 12"

A real strategy and real client apps in one process, so that nothing but Flower's own work and training is in a round:
the hardest case for the ratio. The audit worker is another process and competes for the same cores.
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
    """One federation."""

    audits: str
    clients: int
    rounds: int
    rounds_a_minute: float
    ratio: float
    """Rounds a minute over those without audits, both medians of the repeats."""
    cpu_ratio: float
    """Processor time a round of the server's process over that without audits: other processes do not disturb it."""
    aggregate_ms: float
    """Median time in which the strategy takes the replies of a round, audits submitted."""
    done: int
    dropped: int
    server_mebibytes: float
    """The largest resident size of the server's process so far."""
    worker_mebibytes: float
    """The largest resident size of the audit worker that was seen; 0 without one."""
    same_model: bool


def net() -> nn.Sequential:
    return simulate.mlp(3072, [200, 200], 10, generator=torch.Generator().manual_seed(3))


app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """One epoch over a client's batch of 16 pictures, in two steps: FedAvg as the quickstart has it, but small."""
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
    """The largest resident size of a process, in MiB, as Linux has it."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


class Loop(InProcess):
    """All clients one after another, in this process."""

    def __init__(self, clients: int) -> None:
        super().__init__(clients)
        self.worker, self.ends, self.cpu = 0.0, [time.monotonic()], [time.process_time()]
        self.handed: float | None = None
        self.aggregating: list[float] = []
        self.strategy: Strategy | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        if self.handed is not None:
            self.aggregating.append(time.monotonic() - self.handed)
        replies = []
        for each in sorted(messages, key=lambda each: each.metadata.dst_node_id):
            node = each.metadata.dst_node_id
            replies.append(app(each, Context(1, node, {}, RecordDict(), {})))
        if isinstance(self.strategy, AuditStrategy) and self.strategy.auditor.worker is not None:
            self.worker = max(self.worker, peak(self.strategy.auditor.worker))
        if replies:
            self.ends.append(time.monotonic())
            self.cpu.append(time.process_time())
        self.handed = self.ends[-1] if replies else None
        return replies


@dataclass(frozen=True)
class Run:
    """One federation, measured."""

    seconds: float
    cpu: float
    aggregate: float
    done: int
    dropped: int
    worker: float
    model: dict[str, bytes]


def run(strategy: Strategy, clients: int, rounds: int) -> Run:
    grid = Loop(clients)
    grid.strategy = strategy
    initial = ArrayRecord({key: Array(each.numpy()) for key, each in net().state_dict().items()})
    config = ConfigRecord({"lr": 0.01, "momentum": 0.9})
    result = strategy.start(grid, initial, num_rounds=rounds, train_config=config)
    auditor = strategy.auditor if isinstance(strategy, AuditStrategy) else None
    return Run(
        seconds=(grid.ends[-1] - grid.ends[1]) / (rounds - 1),  # the first round warms everything up
        cpu=(grid.cpu[-1] - grid.cpu[1]) / (rounds - 1),
        aggregate=statistics.median(grid.aggregating),
        done=0 if auditor is None else len(auditor.outcomes),
        dropped=0 if auditor is None else auditor.dropped,
        worker=grid.worker,
        model={key: each.numpy().tobytes() for key, each in result.arrays.items()},
    )


def rows(clients: list[int], rounds: int, repeats: int) -> Iterable[Row]:
    """All kinds in turn, so many times over: what else the machine does falls on all of them."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        pass
    else:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("spearpp.integrations").setLevel(logging.CRITICAL)
    columns = {"clients": 8, "rounds": 8, "rounds/min": 12, "ratio": 7, "CPU ratio": 11, "aggregate ms": 14, "done": 6}
    columns |= {"dropped": 9, "server MiB": 12, "worker MiB": 12, "same model": 12}
    print(f"{'audits':<14}" + "".join(f"{title:>{width}}" for title, width in columns.items()))
    kinds: dict[str, int | None] = {"none": 0, "one a round": 1, "every reply": None}
    for count in clients:
        runs: dict[str, list[Run]] = {name: [] for name in kinds}
        for _ in range(repeats):
            for name, sample in kinds.items():
                with tempfile.TemporaryDirectory() as out:
                    audited = AuditStrategy(fedavg(), sample=sample, budget=3.0, out=out)
                    runs[name].append(run(fedavg() if name == "none" else audited, count, rounds))
        base = runs["none"]
        yield from (told(name, count, rounds, base, each) for name, each in runs.items())


def told(name: str, clients: int, rounds: int, base: list[Run], runs: list[Run]) -> Row:
    def middle(of: list[Run], what: str) -> float:
        return statistics.median(getattr(each, what) for each in of)

    row = Row(
        audits=name,
        clients=clients,
        rounds=rounds * len(runs),
        rounds_a_minute=60 / middle(runs, "seconds"),
        ratio=middle(base, "seconds") / middle(runs, "seconds"),
        cpu_ratio=middle(runs, "cpu") / middle(base, "cpu"),
        aggregate_ms=1000 * middle(runs, "aggregate"),
        done=sum(each.done for each in runs),
        dropped=sum(each.dropped for each in runs),
        server_mebibytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        worker_mebibytes=max(each.worker for each in runs),
        same_model=all(each.model == base[0].model for each in runs),
    )
    print(
        f"{name:<14}{clients:>8}{row.rounds:>8}{row.rounds_a_minute:>12.1f}{row.ratio:>7.2f}{row.cpu_ratio:>11.2f}"
        f"{row.aggregate_ms:>14.0f}{row.done:>6}{row.dropped:>9}{row.server_mebibytes:>12.0f}"
        f"{row.worker_mebibytes:>12.0f}{row.same_model!s:>12}",
        flush=True,
    )
    return row


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    return command.run(rows(given.clients, given.rounds, given.repeats), given.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
