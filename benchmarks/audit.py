"""Audits many simulated clients and compares the verdicts with the truth.

    make bench NAME=audit                               # all tables, on 2 CPU cores
    make bench NAME=audit ARGS="--rows alarms"

paper    the paper's FedAvg and DP rows, through files and layer discovery, with noise from Opacus (CIFAR-10)
wire     inputs that are recovered, by precision of the update and batch size
clients  inputs that are recovered from a sum, by number of clients
alarms   updates that cannot leak, because they are not gradients of Linear and ReLU layers (none may be reported)
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import spearpp
from benchmarks import command
from benchmarks.recovery import FIRST_SEED
from spearpp import ClientUpdate, Verdict, simulate
from spearpp.metrics import PAPER_NOISY_PSNR, PAPER_PSNR
from spearpp.search import Gated
from spearpp.simulate import Batch, Cast, Client, FedAvg, FedSGD, OpacusDPSGD, Quantise, SumOfClients


@dataclass(frozen=True)
class Row:
    """Results of several audits of one kind of client."""

    client: str
    b: int
    audits: int
    leaks: int
    """Number of audits with the verdict LEAKS."""
    inputs: int
    """Number of inputs in all batches."""
    exact: int
    """Number of inputs recovered with a PSNR above 90 dB."""
    close: int
    """Number of inputs recovered with a PSNR above 25 dB, the threshold of the paper's Tables 3 and 4."""
    wrong: int
    """Number of reported inputs with a PSNR below 15 dB to every input of the batch: as far as unrelated images."""
    median_psnr: float
    labels: int
    """Number of inputs whose label was recovered correctly."""
    median_replay: float
    """Median relative difference between the update and its replay; nan if there was no replay."""


def measure(name: str, client: Client, b: int, audits: int, data: str | None, budget: float | None = None) -> Row:
    """Audit ``audits`` clients. Each update is written to a file and read again."""
    leaks, exact, close, wrong, labels, psnrs, replays = 0, 0, 0, 0, 0, [], []
    for seed in range(FIRST_SEED, FIRST_SEED + audits):
        generator = torch.Generator().manual_seed(seed)
        batch = simulate.cifar10(b, path=data, generator=generator)
        model = simulate.mlp(3072, [200, 200, 200], 10, generator=generator)
        with tempfile.TemporaryDirectory() as folder:
            client(model, batch, generator).save(Path(folder) / "client.safetensors")
            update = ClientUpdate.load(Path(folder) / "client.safetensors").read()
        result = spearpp.audit(update, model, budget=budget)
        leaks += result.verdict is Verdict.LEAKS
        replays += [] if result.replay is None else [result.replay.difference]
        if result.best is not None and result.best.layer.sees == "inputs":
            score = spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation)
            exact += int((score.psnr > PAPER_PSNR).sum())
            close += int((score.psnr > PAPER_NOISY_PSNR).sum())
            psnrs += score.psnr.tolist()
            nearest = [_nearest(x, batch) for x in result.inputs]
            wrong += sum(each < 15 for each in nearest)
            labels += _correct_labels(result, batch)
    median = statistics.median(psnrs) if psnrs else float("nan")
    replay = statistics.median(replays) if replays else float("nan")
    return Row(name, b, audits, leaks, b * audits, exact, close, wrong, median, labels, replay)


def _nearest(x: torch.Tensor, batch: Batch) -> float:
    """Return the largest PSNR between x and an input of the batch."""
    return float(spearpp.score(x[None], batch.inputs, normalisation=batch.normalisation).psnr.max())


def _correct_labels(result: spearpp.AuditResult, batch: Batch) -> int:
    best = result.best
    if best is None or best.labels is None or best.inversion is None:
        return 0
    order = spearpp.score(best.inversion.inputs, batch.inputs, normalisation=batch.normalisation).assignment
    return int((best.labels[order[order >= 0]] == batch.labels[order >= 0]).sum())


def paper(data: str | None) -> Iterator[Row]:
    """Measure the clients of the paper. σ = 1e-4 on the mean of 20 samples with C = 2 is a noise multiplier of 1e-3."""
    yield measure("FedSGD", FedSGD(), 20, 20, data)
    yield measure("FedAvg E=3, mini-batch 5, 1e-2", FedAvg(3, 5, 1e-2), 20, 20, data, budget=60)
    yield measure("the same, momentum 0.9, 1e-3", FedAvg(3, 5, 1e-3, momentum=0.9), 20, 20, data, budget=60)
    for sigma in (1e-5, 1e-4, 1e-3):
        name, multiplier = f"Opacus C=2, σ={sigma:g} of the mean", sigma * 20 / 2
        yield measure(name, OpacusDPSGD(2.0, multiplier), 20, 20, data, budget=20)


def wire(data: str | None) -> Iterator[Row]:
    """Measure clients that send their update with fewer bits."""
    forms: list[tuple[str, Client]] = [
        ("float32", FedSGD()),
        ("float16", FedSGD() | Cast(torch.float16)),
        ("bfloat16", FedSGD() | Cast(torch.bfloat16)),
        ("int8", FedSGD() | Quantise(8)),
        ("int4", FedSGD() | Quantise(4)),
    ]
    for name, client in forms:
        for b in (5, 10, 20, 40):
            yield measure(name, client, b, 5, data, budget=8)


def clients(data: str | None) -> Iterator[Row]:
    """Measure sums of clients with ten samples each."""
    for count in (1, 2, 4, 6, 8, 9):
        yield measure(f"sum of {count} clients of 10", SumOfClients(FedSGD(), count), 10 * count, 5, data, budget=60)


@dataclass(frozen=True)
class Alarms:
    """Number of updates that cannot leak, and number of those with the verdict LEAKS."""

    kind: str
    audits: int
    leaks: int


def alarms(count: int) -> Iterator[Alarms]:
    """Audit networks without ReLU, updates of Adam, and random matrices of the same rank or spectrum."""
    for kind in ("GELU", "Tanh", "LeakyReLU", "Adam", "random, same rank", "rotated, same spectrum"):
        leaks = 0
        for seed in range(count):
            leaks += spearpp.audit(_update_without_leak(kind, seed), search=Gated(starts=256)).verdict is Verdict.LEAKS
        yield Alarms(kind, count, leaks)


def _update_without_leak(kind: str, seed: int) -> ClientUpdate:
    """Return an update of a kind that cannot leak."""
    generator = torch.Generator().manual_seed(seed)
    b, m = 4 + seed % 9, (60, 80, 120)[seed % 3]
    batch = simulate.random_batch(b, features=30, generator=generator)
    torch.manual_seed(seed)
    if kind in ("GELU", "Tanh", "LeakyReLU"):
        between = {"GELU": nn.GELU(), "Tanh": nn.Tanh(), "LeakyReLU": nn.LeakyReLU(0.1)}[kind]
        return FedSGD()(nn.Sequential(nn.Linear(30, m), between, nn.Linear(m, 10)), batch)
    update = FedSGD()(simulate.mlp(30, [m], 10, generator=generator), batch)
    gradients = dict(update.gradients)
    if kind == "Adam":
        gradients = {name: each / (each.abs() + 1e-8) for name, each in gradients.items()}
    elif kind.startswith("random"):
        for name, each in gradients.items():
            inner = torch.randn(b, *each.shape[1:], generator=generator)
            gradients[name] = torch.randn(len(each), b, generator=generator) @ inner
    else:
        u, s, v = torch.linalg.svd(gradients["0.weight"], full_matrices=False)
        rotated = torch.linalg.qr(torch.randn(m, m, generator=generator))[0] @ u
        gradients["0.weight"] = rotated @ torch.diag(s) @ v
    return replace(update, gradients=gradients)


def main() -> int:
    parser = command.parser(__doc__)
    names = ["paper", "wire", "clients", "alarms"]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--alarms", type=int, default=90, help="number of audits of each kind of update that cannot leak"
    )
    options = parser.parse_args()

    def rows() -> Iterator[Row | Alarms]:
        for name in options.rows:
            if name == "alarms":
                yield from alarms(options.alarms)
            else:
                yield from {"paper": paper, "wire": wire, "clients": clients}[name](options.data)

    return command.run(command.printed(rows()), options.out)


if __name__ == "__main__":
    sys.exit(main())
