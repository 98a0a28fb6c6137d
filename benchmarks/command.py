"""Command-line options, timing and output that the benchmarks share."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from spearpp.errors import SpearError
from spearpp.experiments.cell import FIRST_SEED

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Row = TypeVar("Row", bound=DataclassInstance)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with --data, --device and --out. Each benchmark adds its own options."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help="CIFAR-10 npz file or its folder; default: the path in SPEARPP_DATA")
    options.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", type=Path, help="also write the rows to this file as JSON")
    return options


def add_first(options: argparse.ArgumentParser) -> None:
    """Add --first, so that several processes can share the seeds of a row."""
    options.add_argument("--first", type=int, default=FIRST_SEED, help="first seed of every row; default: %(default)s")


def run(rows: "Iterable[DataclassInstance]", out: Path | None) -> int:
    """Measure all rows and return the exit status: 0, or 2 after an error of spearpp.

    ``out`` is written after every row, so an interrupted benchmark keeps its rows.
    """
    measured = []
    try:
        for row in rows:
            measured.append(asdict(row))
            if out:
                out.write_text(json.dumps(measured, indent=1, default=str))  # str for a dtype of a search
    except SpearError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def printed(rows: "Iterable[Row]") -> "Iterator[Row]":
    """Yield rows as they are measured, and print them as Markdown tables with a column for every field."""
    kind = None
    for row in rows:
        if type(row) is not kind:
            kind = type(row)
            print_head(*(field.name for field in fields(row)))
        values = [getattr(row, field.name) for field in fields(row)]
        print_row(*(f"{value:.4g}" if isinstance(value, float) else value for value in values))
        yield row


def print_row(*cells: object) -> None:
    """Print one row of a Markdown table."""
    print("| " + " | ".join(str(each) for each in cells) + " |", flush=True)


def print_head(*names: str) -> None:
    """Print the first two rows of a Markdown table: the names of the columns, and the line below them."""
    print_row(*names)
    print("|" + "---|" * len(names), flush=True)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that ``work`` takes, including work that it leaves running on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak(device: torch.device) -> float:
    """Return the GFLOP/s of a large square float32 matrix product: the fastest of five.

    The sizes are large enough to keep all cores of the device busy.
    """
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device)
    return 2 * size**3 / min(seconds(lambda: a @ a, device) for _ in range(5)) / 1e9
