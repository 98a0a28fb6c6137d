"""``spearpp watch``."""

from pathlib import Path
from typing import Annotated

import typer

from spearpp.cli import options
from spearpp.cli.audit import redaction
from spearpp.cli.console import output
from spearpp.cli.exits import BAD_INPUT, LEAK
from spearpp.cli.models import model_of
from spearpp.errors import OptionError
from spearpp.update import KINDS

STYLES = {"LEAKS": "bold red", "NOT_FOUND": "bold yellow", "NOT_APPLICABLE": "bold blue"}


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where updates appear.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the reports, and for what was done.")] = Path("audits"),
    before: Annotated[
        Path | None, typer.Option(help="The weights the clients had, for files that hold none.", show_default=False)
    ] = None,
    model: options.Model = "none",
    kind: options.Kind = "weights",
    lr: options.Rate = None,
    steps: options.Steps = None,
    budget: Annotated[str, typer.Option(help="Time for one update: 60s, 2m, 1h.")] = "60s",
    memory: options.Memory = "8G",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="End when every file there is was dealt with.")] = False,
    fail_on: options.FailOn = "never",
    redact: options.Redact = "none",
    seed: options.Seed = 0,
) -> None:
    """Audit update files as they appear in a folder, one report each. Ctrl-C ends it; a restart goes on.

    \b
    spearpp watch updates --model mlp
    spearpp watch updates --before round3.pt --lr 0.01 --out audits
    spearpp watch updates --once --fail-on leak
    """  # noqa: D301
    from spearpp.integrations.common.job import Settings
    from spearpp.integrations.watch import Watch

    options.check_fail_on(fail_on)
    if not interval > 0:
        raise OptionError(f"--interval {interval}: a positive number of seconds")
    named = next((each for each in KINDS if each == kind), None)
    if named is None:
        raise OptionError(f"--kind {kind}: one of {', '.join(KINDS)}")
    settings = Settings(None, options.seconds(budget), out, redaction(redact), seed, memory=options.size(memory))
    watched = Watch(
        folder,
        settings,
        before=before,
        kind=named,
        lr=lr,
        steps=steps,
        model_of=lambda update: model_of(model, update),
    )
    console, leaked, broken = output(), False, False
    for outcome in watched.run(interval, once=once):
        leaked = leaked or options.fails(fail_on, leaks=outcome.leaks, fitting=outcome.fitting)
        broken = broken or outcome.verdict is None
        console.print(
            f"{outcome.name}: {outcome.summary}", style=STYLES.get(outcome.verdict or "", "red"), markup=False
        )
        if outcome.problem not in (None, outcome.summary):
            console.print(f"{outcome.name}: {outcome.problem}", style="red", markup=False)
    known = any(
        options.fails(fail_on, leaks=each.get("verdict") == "LEAKS", fitting=int(each.get("fitting") or 0))
        for each in watched.memory.values()
    )
    if leaked or known:
        raise typer.Exit(LEAK)
    raise typer.Exit(BAD_INPUT if fail_on != "never" and broken else 0)  # a gate that could not look does not open
