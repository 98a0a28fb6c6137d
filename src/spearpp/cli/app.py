"""The ``spearpp`` command, and the handling of errors that all subcommands share."""

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from typer import Option

from spearpp.cli import audit, compare, demo, experiments, layers, preflight, report, score, simulate, watch
from spearpp.cli.console import BAD_INPUT, INTERNAL, INTERRUPTED
from spearpp.errors import MissingExtraError, NonFiniteError, SpearError

TRACEBACK = "--traceback"

app = typer.Typer(
    name="spearpp",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]spearpp demo[/bold]. Audit only systems that you own or are allowed to test.",
)


class _InterruptedError(Exception):
    """Ctrl-C ended a command before it wrote anything. Typer would exit without a message."""


def _report_interrupt(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that Ctrl-C reaches ``main`` instead of Typer."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            raise _InterruptedError from None

    return run


for command in (
    *(demo.demo, audit.audit, preflight.preflight, layers.layers, simulate.simulate, score.score),
    *(report.report, compare.compare, watch.watch, experiments.reproduce, experiments.frontier),
):
    app.command()(_report_interrupt(command))


@app.callback(invoke_without_command=True)
def _global_options(
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
    show_traceback: Annotated[
        bool,
        Option(TRACEBACK, help="Print the Python traceback of an error. Accepted anywhere on the command line."),
    ] = False,
) -> None:
    """Find out whether a client's update in federated learning reveals its training data, and which defences help."""
    del show_traceback  # ``main`` removes this option from the arguments before Typer parses them.
    if version:
        import spearpp

        typer.echo(f"spearpp {spearpp.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return 0 for success, or one of the exit codes in ``spearpp.cli.console``.

    The arguments are those of the command line without the program name, by default ``sys.argv[1:]``.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = TRACEBACK in arguments
    error_console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        code = app([each for each in arguments if each != TRACEBACK], prog_name="spearpp", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, _InterruptedError):
        error_console.print("interrupted: nothing was written", style="yellow")
        return INTERRUPTED
    except typer.Abort:
        error_console.print("aborted", style="yellow")
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return BAD_INPUT
    except Exception as error:
        command = next((each for each in arguments if not each.startswith("-")), "COMMAND")
        return _print_error(error, show_traceback, error_console, command)


def _print_error(error: Exception, show_traceback: bool, console: Console, command: str) -> int:
    if show_traceback:
        console.print(traceback.format_exc(), markup=False)
    expected = isinstance(error, SpearError | OSError | click.ClickException)
    message = str(error) if isinstance(error, SpearError) else f"{type(error).__name__}: {error}"
    if isinstance(error, click.ClickException):
        message = error.format_message()
    console.print(f"error: {message}", style="red", markup=False)
    defect = "This is a defect in spearpp. Run the command again with --traceback and report the output."
    advice = _hint(error, command) if expected else defect
    if advice:
        console.print(f"hint: {advice}", markup=False)
    return BAD_INPUT if expected else INTERNAL


def _hint(error: Exception, command: str) -> str:
    """Return what the user can try next, or an empty string if the error message itself says what to do.

    Whoever raises a ``SpearError`` passes the suggestion as ``hint=``. Other errors get one by their type.
    """
    if isinstance(error, MissingExtraError):
        return ""
    if isinstance(error, SpearError) and error.hint:
        return error.hint
    if isinstance(error, NonFiniteError):
        return "audit another round: the client's training diverged, or the file is damaged"
    if isinstance(error.__cause__ or error, FileNotFoundError):
        return "check the path. Relative paths start at the current folder"
    return f"spearpp {command} --help shows examples"
