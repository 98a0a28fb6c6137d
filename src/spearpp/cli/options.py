"""Options that several commands share, and how they are read."""

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from spearpp.errors import DataError, OptionError
from spearpp.pictures import Shape

Update = Annotated[
    Path, typer.Argument(help="What the client sent, with its weights; or the weights BEFORE.", show_default=False)
]
After = Annotated[
    Path | None, typer.Argument(help="The weights AFTER, deltas or gradients (--kind).", show_default=False)
]
Kind = Annotated[str, typer.Option(help="What AFTER holds: weights, deltas or gradients.")]
Rate = Annotated[float | None, typer.Option("--lr", help="The client's learning rate, if known.")]
Steps = Annotated[int | None, typer.Option(help="Local steps with the whole batch, or epochs, if known.")]
Model = Annotated[
    str,
    typer.Option(
        help="none; mlp (Linear layers with ReLU between, read off the weights); pkg.mod:factory or file.py:factory."
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="One seed gives one result on one device.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only the verdict.")]
Picture = Annotated[
    str | None,
    typer.Option("--shape", help="Shape of an input as a picture, e.g. 3x32x32; none for records. Default: guessed."),
]
Mean = Annotated[
    str | None,
    typer.Option(
        help="Means the inputs were normalised with: one, one a channel, or one a column, e.g. 0.49,0.48,0.45."
    ),
]
Deviation = Annotated[str | None, typer.Option("--std", help="The deviations, likewise.")]
Columns = Annotated[
    str | None, typer.Option(help="Column names of records: a,b,c or a file with one a line (or a CSV's first line).")
]
Redact = Annotated[str, typer.Option(help="none, blur (4 x 4 blocks) or omit what was recovered.")]
Truth = Annotated[Path | None, typer.Option(help="The client's own batch, to show beside it; the audit never sees it.")]
Memory = Annotated[
    str, typer.Option(help="What the work on one layer may take: 512M, 8G, none; larger ones are skipped.")
]
SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str | None) -> float | None:
    """A time like 60, 90s, 2m or 1h in seconds.

    >>> seconds("90s"), seconds("2m"), seconds(None)
    (90.0, 120.0, None)
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*", text)
    if not found or not float(found[1]) > 0:
        raise OptionError(f"--budget {text}: a time like 60, 90s, 2m or 1h")
    return float(found[1]) * UNITS[found[2] or ""]


def size(text: str) -> int | None:
    """A size like 512M or 8G in bytes; None for none.

    >>> size("512M"), size("1.5GiB"), size("none")
    (536870912, 1610612736, None)
    """
    if text.lower() == "none":
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not found or not float(found[1]) * SIZES[found[2].upper()] >= 1:
        raise OptionError(f"--memory {text}: a size like 512M or 8G, or none for no bound")
    return int(float(found[1]) * SIZES[found[2].upper()])


def device_of(name: str) -> torch.device:
    """The device of that name; auto is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"--device {name}: auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {name}: auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"--device {name}: there is no CUDA device here")
    return device


def shown(shape: str | None, mean: str | None, std: str | None, columns: str | None) -> dict[str, Any]:
    """What was said of how inputs are to be shown, as ``Presentation.of`` takes it."""
    if (mean is None) != (std is None):
        raise OptionError("--mean and --std: both, or neither")
    return {
        "shape": _shape(shape),
        "records": shape is not None and shape.lower() == "none",
        "mean": _numbers("--mean", mean),
        "std": _numbers("--std", std),
        "columns": _names(columns),
    }


def _shape(text: str | None) -> Shape | None:
    if text is None or text.lower() == "none":
        return None
    sizes = [int(part) for part in re.findall(r"\d+", text)]
    if len(sizes) == 2:
        sizes = [1, *sizes]
    if len(sizes) != 3 or min(sizes) < 1 or not re.fullmatch(r"\d+(\s*[x,×]\s*\d+){1,2}", text.strip()):
        raise OptionError(f"--shape {text}: channels x height x width, e.g. 3x32x32, or none")
    return sizes[0], sizes[1], sizes[2]


def _numbers(name: str, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"{name} {text}: numbers with commas between, e.g. 0.49,0.48,0.45") from error


def _names(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    file = Path(text)
    if "," not in text and file.suffix and not file.is_file():
        raise DataError(f"--columns {text}: there is no such file")
    if "," not in text and file.is_file():
        try:
            with file.open(encoding="utf-8") as lines:
                content = lines.read(2**20)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as text: {error}") from error
        first = content.splitlines()[0] if content else ""
        text = first if "," in first else ",".join(line for line in content.splitlines() if line.strip())
    return tuple(part.strip().strip('"') for part in text.split(","))


FAIL_ON = ("leak", "certified", "never")
FailOn = Annotated[
    str,
    typer.Option(
        help="Exit code 1 on leak (an input was recovered, or fits without proof), certified (recovered), or never."
    ),
]


def check_fail_on(fail_on: str) -> None:
    """Refuse what is no condition for a gate."""
    if fail_on not in FAIL_ON:
        raise OptionError(f"--fail-on {fail_on}: one of {', '.join(FAIL_ON)}")


def fails(fail_on: str, *, leaks: bool, fitting: int) -> bool:
    """Whether a gate stops an update with this verdict and as many inputs that fit without proof.

    >>> fails("leak", leaks=False, fitting=3), fails("certified", leaks=False, fitting=3)
    (True, False)
    """
    return (leaks and fail_on != "never") or (fitting > 0 and fail_on == "leak")
