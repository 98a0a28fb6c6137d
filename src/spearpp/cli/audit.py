"""``spearpp audit``: audit one update and write a report."""

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
from spearpp.auditing.folder import REDACTIONS, read_document
from spearpp.auditing.memory import MEMORY
from spearpp.cli import options
from spearpp.cli.console import (
    VERDICT_STYLES,
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
from spearpp.model import Sees
from spearpp.report.presentation import shown_width, shows_features
from spearpp.simulate import Batch
from spearpp.update import KINDS


def audit(
    update: options.Update,
    after: options.After = None,
    model: options.Model = "none",
    kind: options.Kind = "weights",
    lr: options.Rate = None,
    steps: options.Steps = None,
    budget: Annotated[str, typer.Option(help="Time limit for all layers together: 60s, 2m or 1h.")] = "60s",
    memory: options.Memory = "8G",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report. Default: audit-NAME, where NAME is the client's file without its ending.",
            show_default=False,
        ),
    ] = None,
    fail_on: options.FailOn = "never",
    as_json: Annotated[bool, typer.Option("--json", help="Print the content of report.json.")] = False,
    as_sarif: Annotated[bool, typer.Option("--sarif", help="Print the content of report.sarif.")] = False,
    truth: options.Truth = None,
    shape: options.Picture = None,
    mean: options.Mean = None,
    std: options.Deviation = None,
    columns: options.Columns = None,
    redact: options.Redact = "none",
    batch_size: Annotated[
        int | None, typer.Option(help="Number of samples the client trained on, if known.", show_default=False)
    ] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
) -> None:
    """Check whether training data can be recovered from an update, and write a report.

    \b
    spearpp audit client7.safetensors --model mlp
    spearpp audit round3.pt client7.pt --lr 0.01 --model mypkg.net:Net
    spearpp audit round3.npz deltas.npz --kind deltas --fail-on leak --sarif > leak.sarif

    \b
    Exit codes: 0 finished, 1 leak (with --fail-on), 2 invalid input, 3 not applicable,
    4 internal error, 130 interrupted.
    Ctrl-C stops the search. The report then contains the samples certified so far.
    """  # noqa: D301
    options.one_of("--fail-on", fail_on, options.FAIL_ON)
    if as_json and as_sarif:
        raise OptionError("--json and --sarif cannot be combined. The report folder contains both files")
    received = read_update(update, after, kind, lr, steps)
    folder = out or Path(f"audit-{(after or update).stem}")
    batch = None if truth is None else Batch.load(truth)
    display = options.display_options(shape, mean, std, columns)
    redaction = options.one_of("--redact", redact, REDACTIONS)
    network = model_of(model, received)
    check_display(received, network, display)
    seconds, memory_limit, _ = options.seconds(budget), options.size(memory), options.device_of(device)
    make_folder(folder)
    silent = quiet or as_json or as_sarif
    result = run(received, network, seconds, seed, device, silent, batch_size, memory_limit, display["shape"])
    with uninterrupted():
        page = reports.write(
            folder,
            result,
            truth=batch,
            presentation=None
            if shows_features(result)
            else reports.Presentation.of(shown_width(result), reports.truth_shown(result, batch), **display),
            redact=redaction,
            command=["spearpp", *sys.argv[1:]],
            source=[str(each) for each in (update, after) if each is not None],
            about={"received": repr(received), "threat_model": received.threat_model},
        )
    if as_json or as_sarif:
        content = read_document(folder)
        typer.echo(json.dumps(reports.sarif(content) if as_sarif else content, indent=1))
    else:
        print_result(result, page, quiet)
    raise typer.Exit(exit_code(result, fail_on))


def read_update(update: Path, after: Path | None, kind: str, lr: float | None, steps: int | None) -> ClientUpdate:
    """Read an update from one or two files and verify all of its tensors.

    The command creates its output folder only afterwards, so that a damaged file leaves no empty folder.
    """
    content = options.one_of("--kind", kind, KINDS)
    if after is None:
        received = ClientUpdate.load(update, kind=content, lr=lr, steps=steps)
    else:
        received = ClientUpdate.load(after, before=update, kind=content, lr=lr, steps=steps)
    received.verify()
    return received


def check_display(update: ClientUpdate, model: torch.nn.Module | None, display: dict[str, Any]) -> None:
    """Check before the search that the display options match the input size of at least one layer.

    If no layer takes the input of the model, as behind convolutions, the size of the input is not known.

    Raises:
        OptionError: If the image shape or the column names match no layer.
    """
    layers = find_layers(model, update)
    sizes = {layer.features for layer in layers} if any(layer.sees != Sees.FEATURES for layer in layers) else set()
    expected = [("--shape describes", math.prod(display["shape"]))] if display["shape"] else []
    expected += [("--columns names", len(display["columns"]))] if display["columns"] else []
    for what, count in expected:
        if sizes and count not in sizes:
            allowed = " or ".join(str(each) for each in sorted(sizes))
            raise OptionError(f"{what} {count} numbers, but the update's layers have inputs of {allowed} numbers")


def run(
    update: ClientUpdate,
    model: torch.nn.Module | None,
    budget: float | None,
    seed: int,
    device: str,
    quiet: bool,
    batch_size: int | None = None,
    memory: int | None = MEMORY,
    input_shape: tuple[int, ...] | None = None,
) -> AuditResult:
    """Audit an update and show live progress on a terminal."""
    with progress(budget, quiet) as show_progress:
        return spearpp.audit(
            update.to(options.device_of(device)),
            model,
            budget=budget,
            memory=memory,
            batch_size=batch_size,
            input_shape=input_shape,
            generator=torch.Generator().manual_seed(seed),
            progress=show_progress,
        )


def print_result(result: AuditResult, page: Path, quiet: bool) -> None:
    """Print the verdict and, unless ``quiet``, the layers, findings, replay, caveats and the path of the report."""
    console = output()
    console.print(safe(result.summary), style=VERDICT_STYLES[result.verdict])
    if result.interrupted:
        console.print("interrupted: the report contains the samples certified so far", style="yellow")
    if quiet:
        return
    print_layers(console, [each.layer for each in result.layers], result.layers)
    print_findings(console, result.findings)
    if result.replay is not None:
        difference = f"{result.replay.difference:.1e} (relative)"
        text = f"replay: recomputed from the recovered samples, the update differs by {difference}"
        if result.replay.baseline:
            text += f"; with pairs of samples averaged, by {result.replay.mixed:.2g}"
            text += f"; with unrelated samples, by {result.replay.unrelated:.2g}"
        console.print(text)
    for caveat in result.caveats:
        console.print(f"- {safe(caveat)}")
    console.print(f"report: {page}", markup=False)


def exit_code(result: AuditResult, fail_on: str) -> int:
    """Return the exit code of an audit."""
    if options.fails(fail_on, leaks=result.verdict is Verdict.LEAKS, fitting=result.fitting):
        return LEAK
    if result.interrupted:
        return INTERRUPTED
    return NOT_APPLICABLE if result.verdict is Verdict.NOT_APPLICABLE else 0
