"""Draws the pictures of the documentation: ``make pictures``.

The pictures of terminals show the output of commands that run on a pseudo-terminal; rich draws them. The pictures of
reports are screenshots in chromium.
"""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.text import Text

from spearpp import simulate

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS = 110
"""Width of the terminal in characters. Design choice."""
TIMEOUT_SECONDS = 240
"""Time after which the output of a command is no longer read. Design choice: no command takes that long."""


def terminal(folder: Path, command: str, *, interrupt_at: bytes = b"") -> tuple[str, int]:
    """Run a command on a terminal of its own. Return all that it wrote there, as ANSI text, and its exit code.

    Args:
        folder: working directory.
        command: the command line, beginning with ``spearpp``.
        interrupt_at: press Ctrl-C as soon as the output contains this text.
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "spearpp", *command.split()[1:]],
        cwd=folder,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "40", "COLORTERM": "truecolor"},
    )
    os.close(follower)
    shown, deadline = b"", time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        ready, _, _ = select.select([leader], [], [], 0.5)
        try:
            shown += os.read(leader, 65536) if ready else b""
        except OSError:
            break
        if interrupt_at and interrupt_at in shown:
            process.send_signal(signal.SIGINT)
            interrupt_at = b""
        if process.poll() is not None and not ready:
            break
    code = process.wait(timeout=60)
    os.close(leader)
    return shown.decode(), code


def final_screen(text: str) -> str:
    """Return the text without lines that were drawn over. Of the progress line, the last state remains."""
    frames = re.split(r"(?:\r?\x1b\[2K|\x1b\[1A\x1b\[2K)+", text.replace("\r\n", "\n"))
    kept = [frame for frame in frames if frame.strip("\r\n\x1b[?25lh ")]
    live = [frame for frame in kept[:-1] if "layer " in frame and "━" in frame]  # the progress bar
    shown = ["layer " + live[-1].rsplit("layer ", 1)[1]] if live else []
    rest = [frame for frame in kept if frame not in live]
    text = re.sub(r"\x1b\[\?25[lh]", "", "".join(rest[:-1] + shown + ["\n"] + rest[-1:]))
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))


def draw(folder: Path, name: str, command: str, *, interrupt_at: bytes = b"") -> None:
    """Run a command, and draw the terminal at its end as SVG."""
    text = final_screen(terminal(folder, command, interrupt_at=interrupt_at)[0])
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, force_terminal=True, file=nowhere)
        console.print(f"$ {command}", style="bold", highlight=False)
        console.print(Text.from_ansi(text.strip("\n")))
        drawn = console.export_svg(title="spearpp")
    # Remove the web font, so that the picture loads nothing from the network.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    (IMAGES / f"{name}.svg").write_text(re.sub(r"terminal-\d+", f"terminal-{name}", drawn))


def page(file: Path, name: str, width: int, height: int, scheme: Literal["light", "dark"]) -> None:
    """Save a screenshot of a report."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), chromium_sandbox=False)
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        opened = context.new_page()
        opened.goto(file.resolve().as_uri())
        opened.screenshot(path=str(IMAGES / f"{name}.png"))
        chromium.close()


def federation(folder: Path) -> Path:
    """Watch a folder with the updates of eight clients, two of which add noise, and return the page of the timeline."""
    (folder / "updates").mkdir()
    for client in range(8):
        generator = torch.Generator().manual_seed(client)
        model = simulate.mlp(64, [100, 100], 10, generator=generator)
        trained = simulate.DPSGD(clip=1.0, noise=0.1) if client in (3, 6) else simulate.FedSGD()
        batch = simulate.digits(6 + 3 * client, generator=generator)
        trained(model, batch, generator).save(folder / "updates" / f"round{client + 1}.safetensors")
    terminal(folder, "spearpp watch updates --out audits --once --interval 0.1 --budget 5s")
    return folder / "audits" / "timeline.html"


def main() -> None:
    """Draw all pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        draw(folder, "demo", "spearpp demo")
        terminal(folder, "spearpp simulate --client fedavg --epochs 2 --mini-batch 8 --samples 24 --out mine")
        draw(folder, "audit", "spearpp audit mine/update.safetensors --model mlp")
        (folder / "client7.safetensors").write_bytes((folder / "mine" / "update.safetensors").read_bytes()[:100_000])
        draw(folder, "bad-file", "spearpp audit client7.safetensors")
        generator = torch.Generator().manual_seed(0)
        batch = simulate.photographs(97, generator=generator)
        model = simulate.mlp(3072, [200, 200], 10, generator=generator)
        simulate.FedSGD()(model, batch).save(folder / "large.safetensors")
        draw(folder, "interrupted", "spearpp audit large.safetensors --budget 10m", interrupt_at=b"round 3")
        page(folder / "demo" / "report.html", "report-1280", 1280, 1500, "light")
        page(folder / "demo" / "report.html", "report-390", 390, 1500, "dark")
        page(federation(folder), "timeline", 1280, 900, "light")


if __name__ == "__main__":
    main()
