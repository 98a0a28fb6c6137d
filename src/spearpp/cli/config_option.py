"""The option ``--config``: a file whose settings are the defaults of the other options."""

from pathlib import Path
from typing import Annotated

import typer

from spearpp.cli.console import output
from spearpp.config import NAME, Config


def _use_as_defaults(context: typer.Context, config: Config | None) -> Config | None:
    """Use the settings of a file as the defaults of the other options, so that options on the command line win."""
    if config is None and Path(NAME).is_file():
        output(stderr=True).print(f"note: {NAME} is not used. Pass --config {NAME} to use it", markup=False)
    if config is not None:
        context.default_map = dict(config.audit)
    return config


ConfigFile = Annotated[
    Config | None,
    typer.Option(
        "--config",
        parser=Config.read,
        metavar="FILE",
        help="File with accepted leaks, thresholds and defaults of other options, usually spearpp.toml.",
        callback=_use_as_defaults,
        is_eager=True,
        show_default=False,
    ),
]
