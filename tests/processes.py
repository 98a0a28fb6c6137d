"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Run Python, which must end without an error, and return what it printed to standard output."""
    command = [sys.executable, *map(str, arguments)]
    changed = os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=changed, capture_output=True, text=True, timeout=300)  # noqa: S603
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
