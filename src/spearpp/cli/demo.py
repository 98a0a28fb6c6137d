"""``spearpp demo``: a client trains one step on photographs; the server gets them back."""

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import torch
import typer

from spearpp import ClientUpdate
from spearpp import report as reports
from spearpp.cli import options
from spearpp.cli.audit import redaction, run, tell
from spearpp.cli.console import make_folder, output, uninterrupted
from spearpp.simulate import FedSGD, mlp, photographs

WIDTH = 200
CLASSES = 10


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the update, the truth and the report.")] = Path("demo"),
    samples: Annotated[int, typer.Option(help="Photographs that the client has.")] = 32,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    redact: options.Redact = "none",
    show: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Play a client with real photographs, audit its update, write the report. Offline, in seconds."""
    generator = torch.Generator().manual_seed(seed)
    batch = photographs(samples, generator=generator)
    model = mlp(batch.inputs.shape[1], [WIDTH] * 3, CLASSES, generator=generator)
    hidden = redaction(redact)
    make_folder(out)
    sent = out / "update.safetensors"
    FedSGD()(model, batch).save(sent)
    if not quiet:
        output().print(
            f"A client takes one training step on {samples} photographs (32 x 32 colour pixels) with a fresh network\n"
            f"of three hidden ReLU layers of {WIDTH}. Its update is {sent}.\n"
            "The audit sees this file, the model and the number of samples, nothing else.\n",
            markup=False,
        )
    received = ClientUpdate.load(sent)
    result = run(received, model, 60.0, seed, device, quiet, samples)
    with uninterrupted():
        page = reports.write(
            out,
            result,
            truth=batch,
            redact=hidden,
            command=["spearpp", *sys.argv[1:]],
            source=[str(sent)],
            about={"received": repr(received), "threat_model": received.threat_model},
        )
    tell(result, page, quiet)
    compared = reports.compare(result, batch)
    if compared is not None and not quiet:
        output().print(f"compared with the truth: {compared}", markup=False)
    if show:
        webbrowser.open(page.resolve().as_uri())
