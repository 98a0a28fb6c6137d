"""``spearpp simulate``: simulate a client and write its update."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
from click.core import ParameterSource
from typer import Context, Option

from spearpp import simulate as simulation
from spearpp.cli import options
from spearpp.cli.console import make_folder, output
from spearpp.cli.demo import CLASSES
from spearpp.errors import OptionError
from spearpp.experiments.source import OFFLINE
from spearpp.simulate import Batch, Change, Client

DATA = {**OFFLINE, "cifar10": simulation.cifar10, "random": simulation.random_batch}
ClientName = Literal["fedsgd", "fedavg", "dpsgd", "opacus"]
NumberFormat = Literal["float32", "float16", "bfloat16", "int8", "int4"]
NUMBER_FORMATS: dict[str, Change] = {
    "float16": simulation.Cast(torch.float16),
    "bfloat16": simulation.Cast(torch.bfloat16),
    "int8": simulation.Quantise(8),
    "int4": simulation.Quantise(4),
}
CLIENTS_WITH: dict[str, tuple[ClientName, ...]] = {
    **dict.fromkeys(("epochs", "mini_batch", "lr", "momentum"), ("fedavg",)),
    "clip": ("dpsgd", "opacus"),
    "noise": ("dpsgd",),
    "noise_multiplier": ("opacus",),
}
"""The options that not every client has, with the clients that have them."""


def simulate(
    context: Context,
    out: Annotated[Path, Option(help="Folder for update.safetensors and truth.safetensors.")] = Path("simulated"),
    data: Annotated[
        str,
        Option(help=f"Data set: {', '.join(DATA)}. For cifar10, the environment variable SPEARPP_DATA names its file."),
    ] = "photographs",
    samples: Annotated[int, Option(help="Number of samples of all clients together.")] = 32,
    hidden: Annotated[str, Option(help="Widths of the hidden ReLU layers, comma-separated.")] = "200,200,200",
    client: Annotated[ClientName, Option(help="How each client trains. (--clients is their number.)")] = "fedsgd",
    epochs: Annotated[int, Option(help="fedavg: number of local epochs.")] = 1,
    mini_batch: Annotated[int, Option(help="fedavg: samples per local step.")] = 8,
    lr: Annotated[float, Option(help="fedavg: learning rate.")] = 0.01,
    momentum: Annotated[float, Option(help="fedavg: momentum.")] = 0.0,
    clip: Annotated[float, Option(help="dpsgd and opacus: norm to which each sample's gradient is clipped.")] = 1.0,
    noise: Annotated[float, Option(help="dpsgd: standard deviation σ of the noise on the mean gradient.")] = 0.0,
    noise_multiplier: Annotated[
        float,
        Option(help="opacus: standard deviation of the noise on the sum of the gradients, divided by --clip."),
    ] = 0.0,
    clients: Annotated[int, Option(help="Number of clients that share the samples. Their updates are summed.")] = 1,
    wire: Annotated[NumberFormat, Option(help="Number format in which the update is sent.")] = "float32",
    keep: Annotated[
        float,
        Option(help="Share of the entries that are sent: 0.1 sends the largest 10 % and sets the others to zero."),
    ] = 1.0,
    seed: options.Seed = 0,
) -> None:
    """Simulate a client. Write its update and, in a separate file, its true batch.

    \b
    spearpp simulate --samples 32 --out mine
    spearpp simulate --client opacus --clip 2 --noise-multiplier 1e-3 --wire float16
    spearpp audit mine/update.safetensors --model mlp --batch-size 32 --truth mine/truth.safetensors
    """  # noqa: D301
    for option, names in CLIENTS_WITH.items():
        if client not in names and context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise OptionError(f"--{option.replace('_', '-')}: only --client {' or '.join(names)} has this option")
    data = data.replace("-", "_")
    if data not in DATA:
        raise OptionError(f"--data {data}: expected one of {', '.join(DATA)}")
    generator = torch.Generator().manual_seed(seed)
    batch: Batch = DATA[data](samples, generator=generator)
    model = simulation.mlp(batch.inputs.shape[1], _widths(hidden), CLASSES, generator=generator)
    clients_by_name: dict[ClientName, Callable[[], Client]] = {
        "fedsgd": simulation.FedSGD,
        "fedavg": lambda: simulation.FedAvg(epochs, mini_batch, lr, momentum=momentum),
        "dpsgd": lambda: simulation.DPSGD(clip, noise),
        "opacus": lambda: simulation.OpacusDPSGD(clip, noise_multiplier),
    }
    simulated = clients_by_name[client]()
    if clients > 1:
        simulated = simulation.SumOfClients(simulated, clients)
    if keep < 1:
        simulated = simulated | simulation.TopK(keep)
    if wire != "float32":
        simulated = simulated | NUMBER_FORMATS[wire]
    update = simulated(model, batch, generator)
    make_folder(out)
    sent, truth = out / "update.safetensors", out / "truth.safetensors"
    update.save(sent)
    batch.save(truth)
    console = output()
    console.print(f"{sent}: {update!r}", markup=False)
    console.print(f"{truth}: {len(batch.inputs)} samples, only for comparison", markup=False)
    known = "" if clients > 1 else f" --batch-size {samples}"
    console.print(f"next: spearpp audit {sent} --model mlp{known} --truth {truth}", markup=False)


def _widths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--hidden {text}: expected comma-separated widths, e.g. 200,200") from error
