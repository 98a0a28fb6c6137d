"""``spearpp simulate``."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from spearpp.cli import options
from spearpp.cli.console import make_folder, output
from spearpp.cli.demo import CLASSES
from spearpp.errors import OptionError
from spearpp.simulate import (
    DPSGD,
    Batch,
    Cast,
    Change,
    Client,
    FedAvg,
    FedSGD,
    OpacusDPSGD,
    Quantise,
    SumOfClients,
    TopK,
    breast_cancer,
    cifar10,
    digits,
    mlp,
    photographs,
    random_batch,
)

DATA = {
    "photographs": photographs,
    "digits": digits,
    "breast-cancer": breast_cancer,
    "cifar10": cifar10,
    "random": random_batch,
}
CLIENTS = ("fedsgd", "fedavg", "dpsgd", "opacus")
WIRES: dict[str, Change] = {
    "float16": Cast(torch.float16),
    "bfloat16": Cast(torch.bfloat16),
    "int8": Quantise(8),
    "int4": Quantise(4),
}


def simulate(
    out: Annotated[Path, typer.Option(help="Folder for update.safetensors and truth.safetensors.")] = Path("simulated"),
    data: Annotated[
        str, typer.Option(help=f"{', '.join(DATA)} (cifar10: SPEARPP_DATA names its file).")
    ] = "photographs",
    samples: Annotated[int, typer.Option(help="Samples in the batch.")] = 32,
    hidden: Annotated[str, typer.Option(help="Widths of the hidden ReLU layers.")] = "200,200,200",
    client: Annotated[str, typer.Option(help=f"{', '.join(CLIENTS)}.")] = "fedsgd",
    epochs: Annotated[int, typer.Option(help="Of fedavg.")] = 1,
    mini_batch: Annotated[int, typer.Option(help="Of fedavg.")] = 8,
    lr: Annotated[float, typer.Option(help="Of fedavg.")] = 0.01,
    momentum: Annotated[float, typer.Option(help="Of fedavg.")] = 0.0,
    clip: Annotated[
        float, typer.Option(help="Of dpsgd and opacus: norm that a sample's gradient is clipped to.")
    ] = 1.0,
    noise: Annotated[float, typer.Option(help="Of dpsgd: σ on the mean; of opacus: the noise multiplier.")] = 0.0,
    clients: Annotated[int, typer.Option(help="Deal the samples to so many, and sum their updates.")] = 1,
    wire: Annotated[str, typer.Option(help=f"float32, {', '.join(WIRES)}.")] = "float32",
    prune: Annotated[float, typer.Option(help="Share of the entries that is sent.")] = 1.0,
    seed: options.Seed = 0,
) -> None:
    """Play a client: write the update it sends and, separately, the truth.

    \b
    spearpp simulate --samples 32 --out mine
    spearpp simulate --client opacus --clip 2 --noise 1e-3 --wire float16
    spearpp audit mine/update.safetensors --model mlp --truth mine/truth.safetensors
    """  # noqa: D301
    if data not in DATA:
        raise OptionError(f"--data {data}: one of {', '.join(DATA)}")
    generator = torch.Generator().manual_seed(seed)
    batch: Batch = DATA[data](samples, generator=generator)
    model = mlp(batch.inputs.shape[1], _widths(hidden), CLASSES, generator=generator)
    player = _client(client, epochs, mini_batch, lr, momentum, clip, noise)
    if clients > 1:
        player = SumOfClients(player, clients)
    if prune < 1:
        player = player | TopK(prune)
    if wire != "float32":
        if wire not in WIRES:
            raise OptionError(f"--wire {wire}: one of float32, {', '.join(WIRES)}")
        player = player | WIRES[wire]
    update = player(model, batch, generator)
    make_folder(out)
    sent, truth = out / "update.safetensors", out / "truth.safetensors"
    update.save(sent)
    batch.save(truth)
    console = output()
    console.print(f"{sent}: {update!r}", markup=False)
    console.print(f"{truth}: {len(batch.inputs)} samples, for comparison only", markup=False)
    console.print(f"next: spearpp audit {sent} --model mlp --truth {truth}", markup=False)


def _client(name: str, epochs: int, mini_batch: int, lr: float, momentum: float, clip: float, noise: float) -> Client:
    if name == "fedsgd":
        return FedSGD()
    if name == "fedavg":
        return FedAvg(epochs, mini_batch, lr, momentum=momentum)
    if name == "dpsgd":
        return DPSGD(clip, noise)
    if name == "opacus":
        return OpacusDPSGD(clip, noise)
    raise OptionError(f"--client {name}: one of {', '.join(CLIENTS)}")


def _widths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--hidden {text}: widths with commas between, e.g. 200,200") from error
