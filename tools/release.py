"""Checks a release: builds it, checks its metadata, installs it into a clean environment and audits an update there.

    .venv/bin/python tools/release.py

Downloads the dependencies into dist/wheels once; later runs reuse them. Everything after that needs no package index:
the new environment gets the wheel with the same command that the Dockerfile runs, and no optional package. The tool
leaves dist/spearpp-VERSION.tar.gz and dist/spearpp-VERSION-py3-none-any.whl, ready to be uploaded.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
from spearpp.about import __version__  # noqa: E402

DIST = ROOT / "dist"
WHEELS = DIST / "wheels"
OPTIONAL = ("opacus", "dp_accounting", "flwr", "nvflare", "ray", "skimage", "sklearn", "tokenizers")
"""Packages of the extras, which a clean environment must not have."""
AUDIT = """
import importlib.util, spearpp
from spearpp import report, simulate
present = [name for name in {optional!r} if importlib.util.find_spec(name)]
assert not present, present
model, batch = simulate.mlp(30, [60, 60], 10), simulate.random_batch(4, features=30)
simulate.FedSGD()(model, batch).save("update.safetensors")
print(spearpp.__version__, spearpp.__file__)
"""


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Run a command and return its output. A failure ends the tool."""
    text = shlex.join(map(str, command))
    print("$", text[:160], flush=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(  # noqa: S603
        [str(each) for each in command], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{text} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def environment(folder: Path) -> Path:
    """Create a virtual environment and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def install_command() -> list[str]:
    """Return the arguments of pip in the Dockerfile, with the folder of wheels of this machine."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    line = next(each for each in text.splitlines() if each.startswith("RUN python -m pip install"))
    words = shlex.split(line.removeprefix("RUN python ").split("&&")[0])
    return [str(WHEELS) if each == "/wheels" else each for each in words]


def build(scratch: Path) -> list[Path]:
    """Build the source distribution, and the wheel from it."""
    python = environment(scratch / "builder")
    run(python, "-m", "pip", "install", "--quiet", "build", "twine")
    for old in DIST.glob("spearpp-*"):
        old.unlink()
    run(python, "-m", "build", "--outdir", DIST)
    built = sorted(DIST.glob(f"spearpp-{__version__}*"))
    assert [each.name for each in built] == [f"spearpp-{__version__}-py3-none-any.whl", f"spearpp-{__version__}.tar.gz"]
    print(run(python, "-m", "twine", "check", "--strict", *built))
    return built


def main() -> int:
    """Run all checks."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wheel, _ = build(scratch)
        download = ("-m", "pip", "wheel", "--quiet", "--constraint", ROOT / "constraints.txt", "--wheel-dir", WHEELS)
        for old in WHEELS.glob("spearpp-*"):
            old.unlink()
        run(sys.executable, *download, "--find-links", WHEELS, wheel)
        shutil.copy(wheel, WHEELS)
        python = environment(scratch / "clean")
        run(python, *install_command())
        run(python, "-m", "pip", "check")
        print(run(python, "-c", AUDIT.format(optional=OPTIONAL), folder=scratch))
        command = python.parent / "spearpp"
        assert run(command, "--version", folder=scratch) == f"spearpp {__version__}\n"
        said = run(command, "audit", "update.safetensors", "--model", "mlp", "--batch-size", "4", folder=scratch)
        assert said.startswith("LEAKS: 4 of 4"), said
        print(said.splitlines()[0])
        names = {each.name for each in (scratch / "audit-update").iterdir()}
        assert {"report.html", "report.json", "report.sarif", "report.junit.xml"} <= names, names
    print(f"spearpp {__version__} installs without extras and audits an update")
    return 0


if __name__ == "__main__":
    sys.exit(main())
