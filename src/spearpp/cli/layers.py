"""``spearpp layers``: list the Linear layers of an update."""

from dataclasses import asdict
from typing import Annotated

from typer import Option

from spearpp import check, find_layers
from spearpp.cli import options
from spearpp.cli.audit import read_update
from spearpp.cli.console import output, print_findings, print_json, print_layers
from spearpp.cli.models import model_of
from spearpp.model import named_as


def layers(
    files: options.Files,
    model: options.Model = "none",
    kind: options.Kind = "weights",
    lr: options.Rate = None,
    steps: options.Steps = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the Linear layers of an update, say which of them an audit can invert, and check the update.

    The check reports noise, compression and other changes to the update.

    \b
    spearpp layers client7.safetensors
    spearpp layers round3.pt client7.pt --model mypkg.net:Net
    """  # noqa: D301
    received = read_update(files or [], kind, lr, steps)
    network = model_of(model, received)
    received = named_as(received, network)
    found = find_layers(network, received)
    findings = check(received, found)
    if as_json:
        listed = {"layers": [asdict(each) for each in found], "findings": [asdict(each) for each in findings]}
        print_json({"update": repr(received), **listed})
        return
    console = output()
    console.print(repr(received), markup=False)
    print_layers(console, found)
    print_findings(console, findings)
