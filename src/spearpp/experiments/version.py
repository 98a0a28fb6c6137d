"""Which code measured a cell, with what, from which commit."""

import hashlib
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy
import scipy
import torch

from spearpp.about import __version__

PACKAGE = Path(__file__).parents[1]
WITHOUT = frozenset(
    "__init__.py __main__.py about.py audit cli experiments integrations pictures.py report".split()  # noqa: SIM905
)
"""What a measurement does not run; of ``experiments`` only the files below count."""
MEASURING = ("experiments/attack.py", "experiments/source.py", "experiments/training.py")


@cache
def code_version() -> str:
    """The release, and a digest of the source that a measurement runs.

    Another digest makes stored cells stale: they stay in the store and are no longer counted.

    >>> code_version().startswith(__version__ + "+")
    True
    """
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).parts[0] not in WITHOUT]
    digest = hashlib.sha256()
    for file in [*files, *(PACKAGE / name for name in MEASURING)]:
        digest.update(file.relative_to(PACKAGE).as_posix().encode())
        digest.update(file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


@cache
def commit() -> str:
    """The git commit of this source, with ``-dirty`` if it was changed since; "unknown" outside a checkout.

    SPEARPP_COMMIT says it where there is no git, as in an image.
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # not some other project's repository around us
        dirty = "-dirty" if _git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return _git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SPEARPP_COMMIT", "unknown")


def versions(device: torch.device) -> dict[str, str]:
    """What a worker ran on."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "device": f"{device.type}: {where}",
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
    return done.stdout.strip()
