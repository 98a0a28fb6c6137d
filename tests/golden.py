"""Clients whose results are recorded in ``golden.json``, so that a change of the code shows as a change of results.

After an intended change of results, write the file again with ``python tests/golden.py``. It holds numbers and names
of kinds, not sentences.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spearpp
from spearpp import simulate
from spearpp.auditing.document import document
from spearpp.simulate import DPSGD, Batch, FedAvg, FedSGD, Quantise, TopK
from spearpp.update import ClientUpdate

FILE = Path(__file__).with_name("golden.json")
PROSE = {"summary", "caveats", "findings", "reason", "outcome", "why", "why_not_certified", "next_layer", "stopped"}
"""Fields of report.json that are sentences."""
MEASURED = {"seconds", "spectrum"}
"""Fields that depend on the machine, or are too long to record."""


def batch_of(b: int, features: int = 60, seed: int = 1) -> Batch:
    return simulate.random_batch(b, features=features, generator=torch.Generator().manual_seed(seed))


def mlp(features: int, *widths: int, bias: bool = True) -> nn.Sequential:
    return simulate.mlp(features, list(widths), 10, bias=bias, generator=torch.Generator().manual_seed(0))


def fedsgd(b: int, *widths: int, bias: bool = True) -> tuple[ClientUpdate, nn.Module | None, int | None]:
    model = mlp(60, *widths, bias=bias)
    return FedSGD()(model, batch_of(b)), model, b


def with_dropout() -> tuple[ClientUpdate, nn.Module | None, int | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 150), nn.ReLU(), nn.Dropout(0.2), nn.Linear(150, 10))
    batch = batch_of(8)
    gradients = torch.autograd.grad(
        nn.functional.cross_entropy(model(batch.inputs), batch.labels), list(model.parameters())
    )
    return ClientUpdate.from_gradients(model, list(gradients)), model, 8


def sigmoid() -> tuple[ClientUpdate, nn.Module | None, int | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 40), nn.Sigmoid(), nn.Linear(40, 10))
    return FedSGD()(model, batch_of(1)), model, 1


def averaged() -> tuple[ClientUpdate, nn.Module | None, int | None]:
    model = mlp(60, 150, 150)
    return FedAvg(epochs=3, mini_batch=8, rate=0.01)(model, batch_of(8)), model, 8


def summed() -> tuple[ClientUpdate, nn.Module | None, int | None]:
    model = mlp(60, 150)
    return ClientUpdate.sum([FedSGD()(model, batch_of(4, seed=s)) for s in (1, 2)]), model, None


def changed(change: Callable[[ClientUpdate], ClientUpdate]) -> tuple[ClientUpdate, nn.Module | None, int | None]:
    model = mlp(60, 150)
    return change(FedSGD()(model, batch_of(8))), model, 8


def noisy() -> tuple[ClientUpdate, nn.Module | None, int | None]:
    model = mlp(60, 200, 200)
    return DPSGD(clip=1e9, noise=1e-5)(model, batch_of(8)), model, 8


def repeated() -> tuple[ClientUpdate, nn.Module | None, int | None]:
    model, batch = mlp(60, 150), batch_of(6)
    inputs, labels = (torch.cat([each, each[:2]]) for each in (batch.inputs, batch.labels))
    twice = replace(batch, inputs=inputs, labels=labels)
    return FedSGD()(model, twice), model, 8


CLIENTS: dict[str, Callable[[], tuple[ClientUpdate, nn.Module | None, int | None]]] = {
    "one layer": lambda: fedsgd(12, 150),
    "two layers": lambda: fedsgd(30, 100, 100),
    "too many samples": lambda: fedsgd(70, 60),
    "no bias": lambda: fedsgd(8, 120, bias=False),
    "no model, no batch size": lambda: (fedsgd(8, 120, 120)[0], None, None),
    "dropout": with_dropout,
    "one sample behind a sigmoid": sigmoid,
    "local epochs": averaged,
    "sum of two clients": summed,
    "quantised": lambda: changed(Quantise(8)),
    "sparsified": lambda: changed(TopK(0.3)),
    "noise": noisy,
    "repeated samples": repeated,
}


def result_of(name: str) -> Any:
    """The numbers of a client's report."""
    update, model, samples = CLIENTS[name]()
    return _numbers(document(spearpp.audit(update, model, batch_size=samples)))


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items() if key not in PROSE | MEASURED}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(json.dumps({name: result_of(name) for name in CLIENTS}, indent=1, sort_keys=True) + "\n")
