"""The largest resident size of an audit whose model has a layer of 100 million weights, by file format.

    make bench NAME=memory
    make bench NAME=memory ARGS="--case first --memory 16G"

Files are written to a temporary folder (3 GiB a case). Every command runs in a fresh process and tells its own largest
resident size at its end, as Linux has it; a command that does nothing (``spearpp --version``) gives the floor.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks import command
from spearpp import ClientUpdate, simulate

WIDE, FEATURES, SAMPLES, RATE = 32_768, 3072, 12, 0.1
CASES = ("inside", "first")
"""Where the large layer is: behind a small one that gives the batch away, or the one that sees it."""
FORMATS = ("ours", "safetensors", "pt", "npz")
CHILD = """
import atexit, sys
from pathlib import Path

def tell():
    status = Path("/proc/self/status").read_text()
    size = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    print(f"peak {int(size) // 1024}", file=sys.stderr)

atexit.register(tell)
from spearpp.cli import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Row:
    """One command on one update."""

    case: str
    format: str
    command: str
    mebibytes: int
    """The largest resident size."""
    exit_code: int
    summary: str
    """The last line but the peak's."""


def net(case: str, wide: int) -> nn.Sequential:
    """A small layer that gives 12 digits away and a large one behind it; or a large one that sees 12 photographs."""
    generator = torch.Generator().manual_seed(0)
    if case == "inside":
        return simulate.mlp(64, [100, FEATURES, wide], 10, generator=generator)
    return simulate.mlp(FEATURES, [wide], 10, generator=generator)


def write(folder: Path, case: str, wide: int) -> None:
    """The same update in every format: our own file, and the weights before and after."""
    model = net(case, wide)
    batch = (simulate.digits if case == "inside" else simulate.photographs)(SAMPLES)
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            each.sub_(RATE * each.grad)
            each.grad = None
    after = {name: each.detach() for name, each in model.named_parameters()}
    for name, tensors in (("before", before), ("after", after)):
        save_file(tensors, folder / f"{name}.safetensors")
        torch.save(tensors, folder / f"{name}.pt")
        arrays = {key: each.numpy() for key, each in tensors.items()}
        numpy.savez(folder / f"{name}.npz", allow_pickle=False, **arrays)
    ClientUpdate.from_weights(before, after, lr=RATE).save(folder / "ours.safetensors")


def run(arguments: list[str], folder: Path) -> tuple[int, int, str]:
    """The largest resident size in MiB, the exit code and the first line said."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", CHILD, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("peak ")]
    found = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("peak ")]
    return (found or [0])[-1], done.returncode, said[0] if said else ""


def rows(cases: list[str], formats: list[str], wide: int, more: list[str]) -> Iterable[Row]:
    print(f"{'case':<8}{'format':<13}{'command':<9}{'MiB':>6}{'exit':>6}  said")
    for case in cases:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write(folder, case, wide)
            yield shown(Row(case, "none", "version", *run(["--version"], folder)))
            for kind in formats:
                files = ["ours.safetensors"] if kind == "ours" else [f"before.{kind}", f"after.{kind}", "--lr", "0.1"]
                yield shown(Row(case, kind, "layers", *run(["layers", *files, "--json"], folder)))
                yield shown(Row(case, kind, "audit", *run(["audit", *files, "-q", "--budget", "20s", *more], folder)))


def shown(row: Row) -> Row:
    line = f"{row.case:<8}{row.format:<13}{row.command:<9}{row.mebibytes:>6}{row.exit_code:>6}  {row.summary[:100]}"
    print(line, flush=True)
    return row


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    options.add_argument("--wide", type=int, default=WIDE, help="neurons of the large layer, with 3072 inputs each")
    options.add_argument("--memory", help="as spearpp audit takes it")
    given = options.parse_args()
    more = [] if given.memory is None else ["--memory", given.memory]
    return command.run(rows(given.case, given.format, given.wide, more), given.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
