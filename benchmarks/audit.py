"""From updates to verdicts: what audits say of clients as there are, and whether they ever cry wolf.

    make bench NAME=audit                               # all tables, 2 CPU cores
    make bench NAME=audit ARGS="--rows alarms"

paper    the paper's FedAvg and DP rows through files, layer discovery and audit, with Opacus doing the DP (CIFAR-10)
wire     precision on the wire and batch size: share of the inputs that came back
clients  how many clients a sum holds: share of the inputs that came back
alarms   updates that hold no batch behind Linear and ReLU: not one may be said to leak
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
from spearpp.search import Gated
from spearpp.simulate import Batch, Cast, Client, FedAvg, FedSGD, OpacusDPSGD, Quantise, SumOfClients


@dataclass(frozen=True)
class Row:
    """Many audits of one kind of client."""

    client: str
    b: int
    audits: int
    leaks: int
    inputs: int
    """In all batches together."""
    exact: int
    """Came back over 90 dB."""
    close: int
    """Came back over 25 dB."""
    wrong: int
    """Said to be in the batch and under 15 dB to every input of it."""
    median_psnr: float
    labels: int
    """Labels told, and right."""
    median_replay: float
    """Median difference of the replay; nan where there was none."""


def measure(name: str, client: Client, b: int, audits: int, data: str | None, budget: float | None = None) -> Row:
    """Audit so many clients, each through a file."""
    leaks, exact, close, wrong, told, psnrs, replays = 0, 0, 0, 0, 0, [], []
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
            exact, close = exact + int((score.psnr > 90).sum()), close + int((score.psnr > 25).sum())
            psnrs += score.psnr.tolist()
            nearest = [_nearest(x, batch) for x in result.inputs]
            wrong += sum(each < 15 for each in nearest)
            told += _labels(result, batch)
    median = statistics.median(psnrs) if psnrs else float("nan")
    again = statistics.median(replays) if replays else float("nan")
    row = Row(name, b, audits, leaks, b * audits, exact, close, wrong, median, told, again)
    print(
        f"{name:<34}{b:>5}{audits:>8}{leaks:>7}{row.inputs:>8}{exact:>11}{close:>11}{wrong:>7}{median:>12.1f}{told:>9}"
        f"{again:>11.1e}",
        flush=True,
    )
    return row


HEADER = "client" + " " * 31 + "b  audits  leaks  inputs  over 90 dB  over 25 dB  wrong  median dB   labels     replay"


def _nearest(x: torch.Tensor, batch: Batch) -> float:
    return float(spearpp.score(x[None], batch.inputs, normalisation=batch.normalisation).psnr.max())


def _labels(result: spearpp.AuditResult, batch: Batch) -> int:
    best = result.best
    if best is None or best.labels is None or best.inversion is None:
        return 0
    order = spearpp.score(best.inversion.inputs, batch.inputs, normalisation=batch.normalisation).assignment
    return int((best.labels[order[order >= 0]] == batch.labels[order >= 0]).sum())


def paper(data: str | None) -> Iterator[Row]:
    """σ = 1e-4 on the mean of 20 with C = 2 is a noise multiplier of 1e-3."""
    print("\n" + HEADER)
    yield measure("FedSGD", FedSGD(), 20, 20, data)
    yield measure("FedAvg E=3, mini-batch 5, 1e-2", FedAvg(3, 5, 1e-2), 20, 20, data, budget=60)
    yield measure("the same, momentum 0.9, 1e-3", FedAvg(3, 5, 1e-3, momentum=0.9), 20, 20, data, budget=60)
    for sigma in (1e-5, 1e-4, 1e-3):
        name, multiplier = f"Opacus C=2, σ={sigma:g} of the mean", sigma * 20 / 2
        yield measure(name, OpacusDPSGD(2.0, multiplier), 20, 20, data, budget=20)


def wire(data: str | None) -> Iterator[Row]:
    """What rounding leaves."""
    print("\n" + HEADER)
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
    """Each client has ten samples."""
    print("\n" + HEADER)
    for count in (1, 2, 4, 6, 8, 9):
        yield measure(f"sum of {count} clients of 10", SumOfClients(FedSGD(), count), 10 * count, 5, data, budget=60)


@dataclass(frozen=True)
class Alarms:
    """Updates that cannot leak, and how many are said to."""

    kind: str
    audits: int
    leaks: int


def alarms(count: int) -> Iterator[Alarms]:
    """GELU, Tanh and leaky networks, Adam, and random matrices of the same rank and spectrum."""
    print("\nkind                          audits  leaks")
    for kind in ("GELU", "Tanh", "LeakyReLU", "Adam", "random, same rank", "turned, same spectrum"):
        leaks = 0
        for seed in range(count):
            leaks += spearpp.audit(_stranger(kind, seed), search=Gated(starts=256)).verdict is Verdict.LEAKS
        print(f"{kind:<28}{count:>8}{leaks:>7}", flush=True)
        yield Alarms(kind, count, leaks)


def _stranger(kind: str, seed: int) -> ClientUpdate:
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
        turned = torch.linalg.qr(torch.randn(m, m, generator=generator))[0] @ u
        gradients["0.weight"] = turned @ torch.diag(s) @ v
    return replace(update, gradients=gradients)


def main() -> int:
    parser = command.parser(__doc__)
    names = ["paper", "wire", "clients", "alarms"]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--alarms", type=int, default=90, help="audits of each kind of stranger")
    options = parser.parse_args()

    def rows() -> Iterator[Row | Alarms]:
        for name in options.rows:
            if name == "alarms":
                yield from alarms(options.alarms)
            else:
                yield from {"paper": paper, "wire": wire, "clients": clients}[name](options.data)

    return command.run(rows(), options.out)


if __name__ == "__main__":
    sys.exit(main())
