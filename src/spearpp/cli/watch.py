"""``spearpp watch``: audit update files as they appear in a folder."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from spearpp.cli import options
from spearpp.cli.console import BAD_INPUT, LEAK, NOT_APPLICABLE, VERDICT_STYLES, output
from spearpp.cli.models import model_of
from spearpp.config import Config
from spearpp.errors import OptionError
from spearpp.integrations.common.job import Settings
from spearpp.integrations.common.outcome import Outcome
from spearpp.integrations.watch import Watch


def watch(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder in which update files appear.")],
    out: Annotated[Path, Option(help="Folder for the reports and for the list of audited files.")] = Path("audits"),
    before: Annotated[Path | None, Option(help="Weights before training, for files that do not contain them.")] = None,
    model: options.Model = "none",
    kind: options.Kind = "weights",
    lr: options.Rate = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    loss: options.ClientLoss = "cross-entropy",
    budget: options.Budget = "60s",
    memory: options.Memory = "8G",
    history: Annotated[
        int,
        Option(
            min=0,
            help="Number of earlier rounds to audit together with a new one. The files of each client must then be in "
            "a folder of their own, in the order of their names, and contain the weights of their round.",
        ),
    ] = 0,
    interval: Annotated[float, Option(help="Seconds between two scans of the folder.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Exit when all files in the folder are processed.")] = False,
    config: options.ConfigFile = None,
    fail_on: options.FailOn = "never",
    redact: options.Redact = "none",
    seed: options.Seed = 0,
) -> None:
    """Audit update files as they appear in a folder, and write one report per file.

    Press Ctrl-C to stop. A restart skips files that were already audited. Audits run on the CPU, one after the other.
    Use spearpp audit for one file on a GPU, or with --shape, --vocabulary or --truth.

    \b
    spearpp watch updates --model mlp
    spearpp watch updates --before round3.pt --lr 0.01 --out audits
    spearpp watch updates --once --fail-on leak
    spearpp watch updates --history 8

    \b
    The page timeline.html in the folder of reports shows all audits over time.
    Exit codes: 0 finished, 1 leak (with --fail-on), 2 invalid input, or (with --fail-on) no update or an update
    that cannot be audited, 3 not applicable (with --fail-on), 4 internal error, 130 interrupted.
    """  # noqa: D301
    if not interval > 0:
        raise OptionError(f"--interval {interval}: expected a positive number of seconds")
    settings = Settings(
        *(None, options.seconds(budget), out, redact, seed),
        about={"model": None if model == "none" else model},
        memory=options.size(memory),
        history=history,
        config=config,
        fail_on=fail_on,
        loss=loss,
    )
    watched = Watch(
        folder,
        settings,
        before=before,
        kind=kind,
        lr=lr,
        steps=steps,
        samples=batch_size,
        model_of=lambda update: model_of(model, update),
    )
    failing = []
    for outcome in watched.run(interval, once=once):
        failing += [outcome] if outcome.fails(config, fail_on) else []
        _print_outcome(outcome, config)
    if watched.empty:
        output(stderr=True).print(f"no update file was found in {folder}", style="yellow", markup=False)
    if fail_on != "never":
        code, why = _gate(watched, watched.failing(fail_on) or failing, config, fail_on)
        output().print(f"gate: {why} (--fail-on {fail_on})", style="bold red" if code else "", markup=False)
        raise typer.Exit(code)


def _print_outcome(outcome: Outcome, config: Config | None) -> None:
    """Print the verdict of one update, what went wrong, and which of its leaks are accepted."""
    style = VERDICT_STYLES.get(outcome.verdict or "", "red")
    output().print(f"{outcome.name}: {outcome.summary}", style=style, markup=False)
    if outcome.problem not in (None, outcome.summary):
        output().print(f"{outcome.name}: {outcome.problem}", style="red", markup=False)
    for line in outcome.acceptances(config):
        output().print(f"{outcome.name}: {line}", style="yellow", markup=False)


def _gate(watched: Watch, failing: list[Outcome], config: Config | None, fail_on: str) -> tuple[int, str]:
    """Return the exit code of the gate, and what failed it.

    A gate must not pass an update that could not be audited.
    """
    if failing:
        more = f" (and {len(failing) - 1:,} more updates)" if len(failing) > 1 else ""
        return LEAK, f"failed: {failing[0].name}{more}: {failing[0].why_refused(config, fail_on)}"
    if watched.empty:
        return BAD_INPUT, "failed: there is no update"
    if None in watched.verdicts:
        return BAD_INPUT, "failed: an update could not be audited"
    if "NOT_APPLICABLE" in watched.verdicts:
        return NOT_APPLICABLE, "failed: the audit was not applicable to an update"
    return 0, "passed"
