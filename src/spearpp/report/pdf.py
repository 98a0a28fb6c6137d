"""Print a report as PDF with a browser that is installed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from spearpp.errors import DataError

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
"""Programs that can print a page without a window, in the order in which they are tried."""
SECONDS = 120.0
"""Time limit for printing. Design choice: a page of 1000 images takes seconds, also on a busy machine."""


def print_pdf(page: Path) -> Path:
    """Print ``report.html``, which loads nothing from outside, to a PDF file beside it, and return its path."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise DataError(
            "no browser was found that can print a PDF. Install Chromium, Chrome or Edge, or open report.html in any "
            "browser and print it there",
            hint="spearpp report DIR without --pdf writes the page",
        )
    target, root = page.with_suffix(".pdf"), hasattr(os, "geteuid") and os.geteuid() == 0
    with tempfile.TemporaryDirectory() as scratch:
        printed = Path(scratch) / "report.pdf"
        command = [
            *(browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
            *(f"--user-data-dir={scratch}/profile", "--no-pdf-header-footer", f"--print-to-pdf={printed}"),
            *(["--no-sandbox"] if root else []),  # Chromium requires it for root.
            page.resolve().as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)  # noqa: S603
        except subprocess.TimeoutExpired as error:
            raise DataError(f"{browser} did not print {page} within {SECONDS:.0f} s") from error
        except OSError as error:
            raise DataError(f"{browser} cannot be started: {error.strerror or error}") from error
        if done.returncode or not printed.is_file():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise DataError(f"{browser} did not print {page} (exit code {done.returncode}): {last[0][:300]}")
        try:
            shutil.copyfile(printed, target)
        except OSError as error:
            raise DataError(f"{target} cannot be written: {error.strerror or error}") from error
    return target
