"""Options that ``spearpp reproduce`` and ``spearpp frontier`` share, and the parsers of their values."""

from pathlib import Path
from typing import Annotated

import typer

from spearpp.errors import OptionError
from spearpp.experiments.defence import AXES, Axis

StoreOption = Annotated[Path, typer.Option("--store", help="SQLite file that stores every measured batch.")]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume",
        help="--resume: reuse the results in the store. --no-resume: fail if the store already exists.",
    ),
]
EngineOption = Annotated[str, typer.Option("--engine", help="local: processes on this machine. ray: a Ray cluster.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Address of a running Ray cluster. Default: start Ray on this machine.")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Number of processes per device (with --engine local).")
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:0. Default: all GPUs, or all CPU cores if there is no GPU."),
]
GpusOption = Annotated[
    float, typer.Option("--gpus", min=0, help="GPUs per batch on Ray. 0.25 runs four batches on one GPU.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for JSON, Markdown, HTML and image files.")]
DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="Data set: photographs, digits, breast_cancer, cifar10, an npz, CSV or Parquet file, or a folder.",
    ),
]
LabelOption = Annotated[
    str | None, typer.Option("--label", help="Column that contains the class, for CSV and Parquet files.")
]


def parse_axis(text: str) -> tuple[Axis, list[float] | None]:
    """Parse ``--axis``: an axis, and its values if they are given.

    >>> parse_axis("bits=4,8")[1]
    [4.0, 8.0]
    """
    name, equals, numbers = text.partition("=")
    if name not in AXES:
        raise OptionError(f"--axis {text}: expected one of {', '.join(AXES)}, optionally with values as in bits=4,8")
    if not equals:
        return AXES[name], None
    try:
        values = [float(each) for each in numbers.split(",")]
    except ValueError as error:
        raise OptionError(f"--axis {text}: expected comma-separated numbers, as in bits=4,8") from error
    whole = AXES[name].whole
    if not all(0 < value < float("inf") for value in values) or (whole and any(value % 1 for value in values)):
        raise OptionError(f"--axis {text}: expected positive{' whole' if whole else ''} numbers")
    return AXES[name], values


def parse_starts(text: str | None) -> int | dict[int, int] | None:
    """Parse ``--starts``: one number, or one number per width.

    >>> parse_starts("65536"), parse_starts("200:1000000,4000:20000")
    (65536, {200: 1000000, 4000: 20000})
    """
    if text is None:
        return None
    try:
        if ":" not in text:
            return int(text)
        return {int(width): int(count) for width, count in (each.split(":") for each in text.split(","))}
    except ValueError as error:
        raise OptionError(
            f"--starts {text}: expected a number, or one per width as in 200:1000000,4000:20000"
        ) from error
