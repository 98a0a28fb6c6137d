"""The commands together, and what happens when one fails."""

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

from spearpp.errors import SpearError

try:
    import typer
    from rich.console import Console
except ImportError as missing:
    raise SystemExit(f"error: the command line needs typer and rich: pip install spearpp ({missing})") from missing

from spearpp.cli import audit, demo, experiments, layers, report, score, simulate, watch
from spearpp.cli.exits import BAD_INPUT, INTERNAL, INTERRUPTED
from spearpp.cli.hints import hint

TRACEBACK = "--traceback"

app = typer.Typer(
    name="spearpp",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: [bold]spearpp demo[/bold]. Use it on systems you own or may test.",
)


class _InterruptedError(Exception):
    """Ctrl-C, where nothing was kept; typer would end without a word."""


def _ended(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            raise _InterruptedError from None

    return run


for command in (demo.demo, audit.audit, layers.layers, simulate.simulate, score.score, report.report, watch.watch):
    app.command()(_ended(command))
experiments.register(app)


@app.callback(invoke_without_command=True)
def _about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
    show: Annotated[bool, typer.Option(TRACEBACK, help="Show where an error came from; may stand anywhere.")] = False,
) -> None:
    """Does this client update give the training batch away, exactly, and what would stop it?"""
    del show  # main takes it, wherever it stands
    if version:
        import spearpp

        typer.echo(f"spearpp {spearpp.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit code. 0 done, 1 leak (with --fail-on leak), 2 bad input, 3 not applicable, 4 a defect."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    show = TRACEBACK in given
    given = [each for each in given if each != TRACEBACK]
    error_console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        code = app(given, prog_name="spearpp", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, _InterruptedError):
        error_console.print("interrupted: nothing was written", style="yellow")
        return INTERRUPTED
    except typer.Abort:
        error_console.print("ended", style="yellow")
        return INTERRUPTED
    except Exception as error:
        return _failed(error, show, error_console)


def _failed(error: Exception, show: bool, console: Console) -> int:
    import click

    if show and not isinstance(error, click.ClickException):
        console.print(traceback.format_exc(), markup=False)
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    known = isinstance(error, SpearError | OSError)
    message = str(error) if isinstance(error, SpearError) else f"{type(error).__name__}: {error}"
    console.print(f"error: {message}", style="red", markup=False)
    advice = hint(error) if known else "this is a defect of spearpp: --traceback shows where; please report it"
    if advice:
        console.print(f"hint: {advice}", markup=False)
    return BAD_INPUT if known else INTERNAL
