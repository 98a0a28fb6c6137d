"""``spearpp audit``."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import spearpp
from spearpp import AuditResult, ClientUpdate, Verdict, find_layers
from spearpp import report as reports
from spearpp.auditing.folder import REDACTIONS, Redaction, read_document
from spearpp.auditing.memory import MEMORY
from spearpp.cli import options
from spearpp.cli.console import (
    COLOURS,
    make_folder,
    output,
    print_findings,
    print_layers,
    progress,
    safe,
    uninterrupted,
)
from spearpp.cli.exits import INTERRUPTED, LEAK, NOT_APPLICABLE
from spearpp.cli.models import model_of
from spearpp.errors import OptionError
from spearpp.simulate import Batch
from spearpp.update import KINDS
from spearpp.update import Kind as UpdateKind


def audit(
    update: options.Update,
    after: options.After = None,
    model: options.Model = "none",
    kind: options.Kind = "weights",
    lr: options.Rate = None,
    steps: options.Steps = None,
    budget: Annotated[str, typer.Option(help="Time for all layers: 60s, 2m, 1h.")] = "60s",
    memory: options.Memory = "8G",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; default: audit-NAME.", show_default=False)
    ] = None,
    fail_on: options.FailOn = "never",
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json.")] = False,
    as_sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF for code-scanning gates.")] = False,
    truth: options.Truth = None,
    shape: options.Picture = None,
    mean: options.Mean = None,
    std: options.Deviation = None,
    columns: options.Columns = None,
    redact: options.Redact = "none",
    batch_size: Annotated[
        int | None, typer.Option(help="How many samples the client trained on, if you know.", show_default=False)
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Find out whether an update gives its training batch away, and write a report.

    \b
    spearpp audit client7.safetensors --model mlp
    spearpp audit round3.pt client7.pt --lr 0.01 --model mypkg.net:Net
    spearpp audit round3.npz deltas.npz --kind deltas --fail-on leak --sarif > leak.sarif

    \b
    Exit codes: 0 done, 1 leak (with --fail-on), 2 bad input, 3 not applicable.
    Ctrl-C ends the search and keeps what was certified so far.
    """  # noqa: D301
    options.check_fail_on(fail_on)
    if as_json and as_sarif:
        raise OptionError("--json and --sarif: one of them; both files are in the folder")
    read = read_update(update, after, kind, lr, steps)
    folder = out or Path(f"audit-{(after or update).stem}")
    batch = None if truth is None else Batch.load(truth)
    shown, hidden = options.shown(shape, mean, std, columns), redaction(redact)
    network = model_of(model, read)
    check_fits(read, network, batch, shown)
    seconds, most, _ = options.seconds(budget), options.size(memory), options.device_of(device)
    make_folder(folder)
    done = run(read, network, seconds, seed, device, quiet or as_json or as_sarif, batch_size, most)
    layer = done.shown
    inside = layer is not None and layer.layer.sees == "features"
    width = 0 if layer is None or layer.inversion is None else layer.inversion.inputs.shape[1]
    with uninterrupted():
        page = reports.write(
            folder,
            done,
            truth=batch,
            presentation=None if inside else reports.Presentation.of(width, batch, **shown),
            redact=hidden,
            command=["spearpp", *sys.argv[1:]],
            source=[str(each) for each in (update, after) if each is not None],
            about={"received": repr(read), "threat_model": read.threat_model},
        )
    if as_json or as_sarif:
        content = read_document(folder)
        typer.echo(json.dumps(reports.sarif(content) if as_sarif else content, indent=1))
    else:
        tell(done, page, quiet)
    raise typer.Exit(exit_code(done, fail_on))


def read_update(update: Path, after: Path | None, kind: str, lr: float | None, steps: int | None) -> ClientUpdate:
    """What the client sent, from one file or two, looked through: a damaged file leaves no folder behind."""
    if kind not in KINDS:
        raise OptionError(f"--kind {kind}: one of {', '.join(KINDS)}")
    named: UpdateKind = next(each for each in KINDS if each == kind)
    if after is None:
        read = ClientUpdate.load(update, kind=named, lr=lr, steps=steps)
    else:
        read = ClientUpdate.load(after, before=update, kind=named, lr=lr, steps=steps)
    read.verify()
    return read


def check_fits(update: ClientUpdate, model: torch.nn.Module | None, truth: Batch | None, shown: dict[str, Any]) -> None:
    """Refuse, before any search, a picture, names or a truth that no layer of the update is fed."""
    fed = {layer.features for layer in find_layers(model, update)}
    wanted = [("the truth's inputs", truth.inputs.shape[1])] if truth is not None else []
    wanted += [("a picture of --shape", math.prod(shown["shape"]))] if shown["shape"] else []
    wanted += [("--columns", len(shown["columns"]))] if shown["columns"] else []
    for what, count in wanted:
        if fed and count not in fed:
            layers = ", ".join(str(each) for each in sorted(fed))
            raise OptionError(f"{what}: {count} numbers, but the update's layers are fed {layers}")


def redaction(text: str) -> Redaction:
    """The redaction of that name."""
    for each in REDACTIONS:
        if each == text:
            return each
    raise OptionError(f"--redact {text}: one of {', '.join(REDACTIONS)}")


def run(
    update: ClientUpdate,
    model: torch.nn.Module | None,
    budget: float | None,
    seed: int,
    device: str,
    quiet: bool,
    batch_size: int | None = None,
    memory: int | None = MEMORY,
) -> AuditResult:
    """Audit with a live line for each layer."""
    place = options.device_of(device)
    with progress(budget, quiet) as tell_progress:
        return spearpp.audit(
            update.to(place),
            model,
            budget=budget,
            memory=memory,
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(seed),
            progress=tell_progress,
        )


def tell(result: AuditResult, page: Path, quiet: bool) -> None:
    """The verdict and where the report is."""
    console = output()
    console.print(safe(result.summary), style=COLOURS[result.verdict])
    if result.interrupted:
        console.print("interrupted: what had been certified by then was kept", style="yellow")
    if quiet:
        return
    print_layers(console, [each.layer for each in result.layers], result.layers)
    print_findings(console, result.findings)
    if result.replay is not None:
        words = f"replay: computed again from what was recovered, the update differs by {result.replay.difference:.1e}"
        if result.replay.baseline:
            words += f" (mixed inputs: {result.replay.mixed:.2g}, unrelated inputs: {result.replay.unrelated:.2g})"
        console.print(words)
    for caveat in result.caveats:
        console.print(f"- {safe(caveat)}")
    console.print(f"report: {page}", markup=False)


def exit_code(result: AuditResult, fail_on: str) -> int:
    """What a gate needs to know."""
    if options.fails(fail_on, leaks=result.verdict is Verdict.LEAKS, fitting=result.fitting):
        return LEAK
    if result.interrupted:
        return INTERRUPTED
    return NOT_APPLICABLE if result.verdict is Verdict.NOT_APPLICABLE else 0
