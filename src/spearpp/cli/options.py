"""Options that several commands share, and functions that parse them."""

import csv
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Argument, Option

from spearpp import config as configuration
from spearpp import update
from spearpp.auditing.folder import Redaction
from spearpp.cli.console import output
from spearpp.config import NAME, Config
from spearpp.config import FailOn as FailOnValue
from spearpp.dp import DELTA, KAPPA, StatedDP
from spearpp.errors import DataError, OptionError
from spearpp.experiments.local import named_device
from spearpp.model.loss import LossName
from spearpp.pictures import Shape
from spearpp.words import read_words

Files = Annotated[
    list[Path] | None,
    Argument(
        metavar="[BEFORE] UPDATE",
        help="File that the client sent, with weights after training, deltas or gradients (see --kind). The file with "
        "the weights before training comes first, unless spearpp wrote the client's file.",
    ),
]
Rounds = Annotated[
    Path | None,
    Option(
        help="Folder with several rounds of one client instead of UPDATE: one file per round that spearpp wrote, or "
        "pairs of files named before and after. Ordered by name, or by the list in rounds.json."
    ),
]
Kind = Annotated[update.Kind, Option(help="Content of the client's file.")]
Rate = Annotated[float | None, Option(help="Learning rate of the client, if known.")]
Steps = Annotated[int | None, Option(help="Local passes over the whole batch (epochs, not mini-batches), if known.")]
Model = Annotated[
    str,
    Option(
        help="Network of the client. none: try every 2-D weight as a Linear layer with ReLU. mlp: build Linear layers "
        "with ReLU from the shapes of the weights. Your own class or function: pkg.mod:factory or file.py:factory."
    ),
]
BatchSize = Annotated[int | None, Option(min=1, help="Number of samples the client trained on, if known.")]
Budget = Annotated[str, Option(help="Time limit for the audit of one update: 60s, 2m or 1h.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed. The same seed and device give the same result.")]
Device = Annotated[str, Option(help="Device for the computation: auto, cpu or cuda.")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print only the verdict.")]
Picture = Annotated[
    str | None,
    Option(
        help="Shape of one input of the model as an image, e.g. 3x32x32. none shows inputs as table rows. Default: "
        "guessed."
    ),
]
Mean = Annotated[
    str | None,
    Option(
        help="Mean with which the inputs were normalised: one number, one per channel or one per column, "
        "e.g. 0.49,0.48,0.45."
    ),
]
Deviation = Annotated[
    str | None,
    Option(help="Standard deviation with which the inputs were normalised, in the same format as --mean."),
]
Columns = Annotated[
    str | None,
    Option(help="Column names of tabular inputs: a,b,c, or a file with one name per line, or a CSV with a header."),
]
Redact = Annotated[
    Redaction,
    Option(help="How to hide recovered inputs. blur: reduce images to 4 x 4 blocks. omit: write no inputs."),
]
Truth = Annotated[Path | None, Option(help="The client's true batch, only to show it beside the recovered inputs.")]
Memory = Annotated[str, Option(help="Memory limit for one layer: 512M, 8G or none. Larger layers are skipped.")]
Vocabulary = Annotated[
    list[str] | None,
    Option(
        help="File with the words or column values of an embedding table: tokenizer.json (needs the extra 'text'), a "
        "JSON list, or one entry per line. If several tables fit, write TABLE=FILE once for each table."
    ),
]
ClientLoss = Annotated[
    LossName,
    Option(
        help="Loss of the client. mse and bce use one-hot targets. The equations of the network and the replay use "
        "the loss; the search for ReLU layers does not."
    ),
]
FailOn = Annotated[
    FailOnValue,
    Option(
        help="When to exit with code 1. leak: the verdict is LEAKS, or an input fits the update but is not proved. "
        "certified: the verdict is LEAKS. never: do not use code 1."
    ),
]
DP_PANEL = "Differential privacy, as the client states it"


def _about_dp(text: str) -> Any:
    """Return an option about DP-SGD, in a panel of its own."""
    return Option(help=text, rich_help_panel=DP_PANEL)


NoiseMultiplier = Annotated[
    float | None,
    _about_dp("Noise multiplier of DP-SGD. The report then shows the bound on every reconstruction attack."),
]
Clip = Annotated[
    float | None,
    _about_dp("Norm to which the client clips each sample's gradient. With --batch-size, the stated noise is checked."),
]
SampleRate = Annotated[float, _about_dp("Probability that a step draws a sample. A rate below 1 needs the extra 'dp'.")]
DPSteps = Annotated[
    int | None,
    _about_dp("Number of DP-SGD steps on the client's data that the server has seen. Default: one for each round."),
]
Kappa = Annotated[float, _about_dp("Probability κ with which an attacker would guess a sample without the update.")]
Delta = Annotated[float, _about_dp("δ at which the composed ε of all DP-SGD steps is shown.")]
BYTES_PER_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MAX_COLUMN_FILE = 2**20
"""Characters read from a file of column names. Design choice: limits memory if a wrong file is named."""


def _use_as_defaults(context: typer.Context, config: Config | None) -> Config | None:
    """Use the settings of a file as the defaults of the other options, so that options on the command line win."""
    if config is None and Path(NAME).is_file():
        output(stderr=True).print(f"note: {NAME} is not used. Pass --config {NAME} to use it", markup=False)
    if config is not None:
        context.default_map = dict(config.audit)
    return config


ConfigFile = Annotated[
    Config | None,
    Option(
        parser=Config.read,
        metavar="FILE",
        help="File with accepted leaks, thresholds and defaults of other options, usually spearpp.toml.",
        callback=_use_as_defaults,
        is_eager=True,
    ),
]


def seconds(text: str) -> float:
    """Parse a duration such as 60, 90s, 2m or 1h, and return seconds.

    >>> seconds("90s"), seconds("2m")
    (90.0, 120.0)
    """
    found = configuration.seconds(text)
    if found is None:
        raise OptionError(f"--budget {text}: expected a duration such as 60, 90s, 2m or 1h")
    return found


def size(text: str) -> int | None:
    """Parse a memory size such as 512M or 8G, and return bytes. Return None for ``none``.

    >>> size("512M"), size("1.5GiB"), size("none")
    (536870912, 1610612736, None)
    """
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match or not float(match[1]) * BYTES_PER_UNIT[match[2].upper()] >= 1:
        raise OptionError(f"--memory {text}: expected a size such as 512M or 8G, or none for no limit")
    return int(float(match[1]) * BYTES_PER_UNIT[match[2].upper()])


def device_of(name: str) -> torch.device:
    """Return the device with this name. ``auto`` is CUDA if a CUDA device is available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return named_device(name, "auto, ")


def display_options(shape: str | None, mean: str | None, std: str | None, columns: str | None) -> dict[str, Any]:
    """Parse the options that say how to show inputs, and return keyword arguments for ``Presentation.of``."""
    if (mean is None) != (std is None):
        raise OptionError("--mean and --std must be given together")
    return {
        "shape": _shape(shape),
        "records": shape is not None and shape.lower() == "none",
        "mean": _numbers("--mean", mean),
        "std": _numbers("--std", std),
        "columns": _column_names(columns),
    }


def sizes(text: str) -> list[int]:
    """Parse sizes such as 3x32x32. The list is empty if the text has another form.

    >>> sizes("3x32x32"), sizes("784"), sizes("3x0"), sizes("wide")
    ([3, 32, 32], [784], [], [])
    """
    parts = re.split(r"\s*[x,×]\s*", text.strip())
    found = [int(part) for part in parts if re.fullmatch(r"\d{1,9}", part)]
    return found if len(found) == len(parts) and all(found) else []


def _shape(text: str | None) -> Shape | None:
    if text is None or text.lower() == "none":
        return None
    shape = sizes(text)
    if len(shape) not in (2, 3):
        raise OptionError(f"--shape {text}: expected channels x height x width, e.g. 3x32x32, or none")
    return shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1]


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"{option} {text}: expected comma-separated numbers, e.g. 0.49,0.48,0.45") from error


def _column_names(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    file = Path(text)
    if "," not in text and file.suffix and not file.is_file():
        raise DataError(f"--columns {text}: this file does not exist")
    if "," not in text and file.is_file():
        try:
            with file.open(encoding="utf-8") as stream:
                lines = stream.read(MAX_COLUMN_FILE).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {file} as text: {error}") from error
        if not lines or "," not in lines[0]:
            return tuple(line.strip().strip('"') for line in lines if line.strip())
        text = lines[0]
    try:
        return tuple(part.strip() for part in next(csv.reader([text], skipinitialspace=True)))
    except csv.Error as error:
        raise DataError(f"--columns {text[:40]}: {error}") from error


def vocabulary(texts: list[str] | None) -> list[str] | dict[str, list[str]] | None:
    """Read the files of ``--vocabulary``, and return the words, or the words of each named table."""
    if not texts:
        return None
    if len(texts) == 1 and ("=" not in texts[0] or Path(texts[0]).is_file()):
        return read_words(texts[0])
    named = [each.partition("=") for each in texts]
    if not all(table and file for table, _, file in named) or len({table for table, _, _ in named}) < len(named):
        raise OptionError(f"--vocabulary {' '.join(texts)}: expected one FILE, or TABLE=FILE once for each table")
    return {table: read_words(file) for table, _, file in named}


def stated_dp(
    noise_multiplier: float | None,
    clip: float | None,
    sample_rate: float,
    steps: int | None,
    kappa: float,
    delta: float,
    epochs: int,
    rounds: int,
) -> StatedDP | None:
    """Return what the client states about its DP-SGD, or None without a noise multiplier.

    If the client trains for several epochs, the number of steps must be given.
    """
    if noise_multiplier is None:
        if clip is not None or steps is not None or sample_rate != 1 or (kappa, delta) != (KAPPA, DELTA):
            given = "--clip, --sample-rate, --dp-steps, --kappa and --delta"
            raise OptionError(f"{given} describe DP-SGD: pass --noise-multiplier too")
        return None
    if steps is None and epochs > 1:
        raise OptionError("pass --dp-steps: with --steps above 1, every mini-batch of every epoch is a step of DP-SGD")
    stated = StatedDP(noise_multiplier, clip, sample_rate, rounds if steps is None else steps, kappa, delta)
    stated.check_packages()
    return stated
