"""What audits cost a Flower federation: time, memory, and what is dropped under load.

    make bench-federation
    make bench-federation ARGS="--clients 50 --rounds 12"

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
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import nn

from benchmarks import command
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
    """Rounds a minute over those without audits."""
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


class Loop(Grid):
    """All clients one after another, in this process."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.worker, self.ends = 0.0, [time.monotonic()]
        self.strategy: Strategy | None = None

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self.clients + 1)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for each in sorted(messages, key=lambda each: each.metadata.dst_node_id):
            node = each.metadata.dst_node_id
            replies.append(app(each, Context(1, node, {}, RecordDict(), {})))
        if isinstance(self.strategy, AuditStrategy) and self.strategy.auditor.worker is not None:
            self.worker = max(self.worker, peak(self.strategy.auditor.worker))
        if replies:
            self.ends.append(time.monotonic())
        return replies

    def set_run(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    run = create_message = push_messages = pull_messages = set_run  # type: ignore[assignment]


def measure(name: str, strategy: Strategy, clients: int, rounds: int, base: Row | None, model: Any) -> tuple[Row, Any]:
    grid = Loop(clients)
    grid.strategy = strategy
    initial = ArrayRecord({key: Array(each.numpy()) for key, each in net().state_dict().items()})
    result = strategy.start(grid, initial, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.01, "momentum": 0.9}))
    trained = {key: each.numpy().tobytes() for key, each in result.arrays.items()}
    lasted = [after - before for before, after in zip(grid.ends[1:], grid.ends[2:], strict=False)]
    rate = 60 / statistics.mean(lasted)
    auditor = strategy.auditor if isinstance(strategy, AuditStrategy) else None
    row = Row(
        audits=name,
        clients=clients,
        rounds=rounds,
        rounds_a_minute=rate,
        ratio=1.0 if base is None else rate / base.rounds_a_minute,
        done=0 if auditor is None else len(auditor.outcomes),
        dropped=0 if auditor is None else auditor.dropped,
        server_mebibytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        worker_mebibytes=grid.worker,
        same_model=model is None or trained == model,
    )
    print(
        f"{name:<22}{clients:>8}{rounds:>8}{rate:>12.1f}{row.ratio:>8.2f}{row.done:>7}{row.dropped:>9}"
        f"{row.server_mebibytes:>12.0f}{grid.worker:>12.0f}{row.same_model!s:>12}",
        flush=True,
    )
    return row, trained


def rows(clients: list[int], rounds: int) -> Iterable[Row]:
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        pass
    else:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.getLogger("spearpp.integrations").setLevel(logging.CRITICAL)
    titles = ("clients", "rounds", "rounds/min", "ratio", "done", "dropped", "server MiB", "worker MiB", "same model")
    widths = (8, 8, 12, 8, 7, 9, 12, 12, 12)
    print(f"{'audits':<22}" + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    with tempfile.TemporaryDirectory() as out:
        for count in clients:
            measure("(warm-up)", fedavg(), count, 2, None, None)
            base, model = measure("none", fedavg(), count, rounds, None, None)
            yield base
            for name, sample in (("one a round", 1), ("every reply", None)):
                strategy = AuditStrategy(fedavg(), sample=sample, budget=10.0, out=Path(out) / name)
                yield measure(name, strategy, count, rounds, base, model)[0]


def fedavg() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    options.add_argument("--rounds", type=int, default=12)
    given = options.parse_args()
    return command.run(rows(given.clients, given.rounds), given.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
