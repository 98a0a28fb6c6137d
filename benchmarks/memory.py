"""Measures the peak memory of an audit of a model with a layer of 100 million weights, by file format.

    make bench NAME=memory
    make bench NAME=memory ARGS="--case first --memory 16G"

Files are written to a temporary folder (3 GiB for each case). Every command runs in a fresh process, which reports its
peak resident memory at its end (Linux only). ``spearpp --version`` shows the memory that Python and torch need.
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
"""Neurons of the large layer, its inputs, the batch size, and the learning rate of the client's step."""
CASES = ("inside", "first")
"""Position of the large layer: behind a small layer that leaks the batch, or the first layer of the model."""
FORMATS = ("ours", "safetensors", "pt", "npz")
"""Formats of the update: the file of ``ClientUpdate.save``, or weights before and after in another format."""
CHILD = """
import atexit, sys
from pathlib import Path

def report():
    status = Path("/proc/self/status").read_text()
    size = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    print(f"peak {int(size) // 1024}", file=sys.stderr)

atexit.register(report)
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
    """Peak resident memory."""
    exit_code: int
    summary: str
    """First line of the output."""


def net(case: str, wide: int) -> nn.Sequential:
    """Return a model whose third layer is large, or whose first layer is large."""
    generator = torch.Generator().manual_seed(0)
    if case == "inside":
        return simulate.mlp(64, [100, FEATURES, wide], 10, generator=generator)
    return simulate.mlp(FEATURES, [wide], 10, generator=generator)


def write(folder: Path, case: str, wide: int) -> None:
    """Write the same update in every format."""
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
    """Run ``spearpp`` and return its peak memory in MiB, its exit code and the first line of its output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", CHILD, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    output = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("peak ")]
    peaks = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("peak ")]
    return (peaks or [0])[-1], done.returncode, output[0] if output else ""


def rows(cases: list[str], formats: list[str], wide: int, audit_options: list[str]) -> Iterable[Row]:
    """Measure all rows."""
    for case in cases:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write(folder, case, wide)
            yield Row(case, "none", "version", *run(["--version"], folder))
            for kind in formats:
                files = ["ours.safetensors"] if kind == "ours" else [f"before.{kind}", f"after.{kind}", "--lr", "0.1"]
                yield Row(case, kind, "layers", *run(["layers", *files, "--json"], folder))
                audit = ["audit", *files, "-q", "--budget", "20s", *audit_options]
                yield Row(case, kind, "audit", *run(audit, folder))


def main() -> int:
    options = command.parser(__doc__)
    options.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    options.add_argument(
        "--wide", type=int, default=WIDE, help="number of neurons of the large layer, which has 3072 inputs"
    )
    options.add_argument("--memory", help="value of the option --memory of spearpp audit")
    given = options.parse_args()
    audit_options = [] if given.memory is None else ["--memory", given.memory]
    return command.run(command.printed(rows(given.case, given.format, given.wide, audit_options)), given.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
