"""``spearpp demo``: a simulated client trains one step on photographs, and the audit recovers them."""

import webbrowser
from pathlib import Path
from typing import Annotated

import torch
from typer import Option

from spearpp import ClientUpdate
from spearpp.cli import options
from spearpp.cli.audit import run, write_report
from spearpp.cli.console import make_folder, output, print_result
from spearpp.simulate import FedSGD, mlp, photographs

WIDTH = 200
"""Neurons of each hidden layer. Design choice: wide enough for the 32 samples, and fast on a CPU."""
CLASSES = 10
"""Outputs of the simulated networks, as many as CIFAR-10 and the digits have classes."""
BUDGET = 60.0
"""Time limit of the audit in seconds. Design choice: the default of ``spearpp audit``. The demo takes a few seconds."""


def demo(
    out: Annotated[Path, Option(help="Folder for the update, the true batch and the report.")] = Path("demo"),
    samples: Annotated[int, Option(help="Number of photographs in the client's batch.")] = 32,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    redact: options.Redact = "none",
    show: Annotated[bool, Option("--open", help="Open the report in the browser.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Simulate a client that trains on photographs, audit its update and write a report. Works offline."""
    generator = torch.Generator().manual_seed(seed)
    batch = photographs(samples, generator=generator)
    model = mlp(batch.inputs.shape[1], [WIDTH] * 3, CLASSES, generator=generator)
    make_folder(out)
    sent = out / "update.safetensors"
    FedSGD()(model, batch).save(sent)
    if not quiet:
        output().print(
            f"A client trains one step on {samples} photographs (32 x 32 pixels, colour). Its network is untrained\n"
            f"and has three hidden ReLU layers of {WIDTH} neurons. The client's update is {sent}.\n"
            "The audit uses only this file, the model and the number of samples.\n",
            markup=False,
        )
    received = ClientUpdate.load(sent)
    settings = {"budget": BUDGET, "batch_size": samples}
    result = run(received, model, seed, options.device_of(device), quiet, settings)
    described = f"untrained network with three hidden ReLU layers of {WIDTH} neurons"
    about = {"client": "simulated client", "model": described}
    page = write_report(out, result, received, [sent], about, truth=batch, redact=redact)
    print_result(result, page, quiet, truth=batch)
    if show:
        webbrowser.open(page.resolve().as_uri())
