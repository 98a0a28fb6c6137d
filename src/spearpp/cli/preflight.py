"""``spearpp preflight``: predict what updates of a model could reveal, before any training."""

from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.table import Table
from typer import Argument, Option

from spearpp import Verdict
from spearpp.cli import options
from spearpp.cli.audit import exit_code
from spearpp.cli.console import VERDICT_STYLES, output, print_json, safe
from spearpp.cli.models import named_model
from spearpp.errors import OptionError
from spearpp.preflight import Optimiser, Preflight
from spearpp.preflight import preflight as run_preflight


def preflight(
    model: Annotated[str, Argument(help="Network of the clients: file.py:factory or pkg.mod:factory.")],
    shape: Annotated[
        str,
        Option(
            "--input",
            help="Shape of one input, e.g. 3x32x32 or 20. If the model starts with an embedding: the number of tokens.",
        ),
    ],
    batch: Annotated[int, Option(min=1, help="Number of samples of each client.")],
    optimizer: Annotated[Optimiser, Option(help="Optimiser of the clients.")] = "sgd",
    epochs: Annotated[
        int | None, Option(min=1, help="Local epochs before weights are sent. Default: one step.")
    ] = None,
    budget: options.Budget = "60s",
    fail_on: options.FailOn = "never",
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> None:
    """Predict what the updates of a model could reveal, layer by layer, and audit a simulated client.

    \b
    spearpp preflight net.py:Net --input 3x32x32 --batch 32
    spearpp preflight net.py:Net --input 20 --batch 32 --optimizer adam --fail-on leak

    \b
    Exit codes: 0 finished, 1 leak of the simulated client (with --fail-on), 2 invalid input,
    3 not applicable, 4 internal error, 130 interrupted.
    """  # noqa: D301
    sizes = options.sizes(shape)
    if not 1 <= len(sizes) <= 5:
        raise OptionError(f"--input {shape}: expected sizes such as 3x32x32, 784 or 20")
    found = run_preflight(
        named_model(model),
        sizes,
        batch,
        optimizer=optimizer,
        epochs=epochs,
        budget=options.seconds(budget),
        generator=torch.Generator().manual_seed(seed),
    )
    result = found.simulated
    if as_json:
        simulated = {"verdict": str(result.verdict), "summary": result.summary, "caveats": result.caveats}
        content = {"layers": [asdict(each) for each in found.forecasts], "batch": batch, "simulated": simulated}
        print_json({**content, "advice": found.advice})
        raise typer.Exit(exit_code(result, fail_on))
    console = output()
    if not quiet:
        console.print(_table(found))
    console.print(f"simulated client of {batch} samples: {safe(result.summary)}", style=VERDICT_STYLES[result.verdict])
    if not quiet:
        more = "Where a layer reveals samples up to a larger batch, another search may recover what this one did not."
        for sentence in (*found.advice, *(() if result.verdict is Verdict.LEAKS else (more,))):
            console.print(f"- {sentence}")
    raise typer.Exit(exit_code(result, fail_on))


def _table(found: Preflight) -> Table:
    table = Table(title="what each layer could reveal", title_justify="left")
    for name in ("layer", "reveals", "up to batch", "reason"):
        table.add_column(name, justify="right" if name == "up to batch" else "left")
    for each in found.forecasts:
        bound = "any" if each.largest_batch is None else str(each.largest_batch or "-")
        style = "" if each in found.exposed else "dim"
        table.add_row(safe(each.layer), each.reveals, bound, safe(each.reason), style=style)
    return table
