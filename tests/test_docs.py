"""The documentation: every block of code runs, every link leads somewhere, the site builds without network.

A ``python``, ``bash`` or ``console`` block of README.md or docs/*.md is run; the blocks of one page share a folder and,
if Python, their names. In a bash block ``spearpp`` is this package's command. An ``output`` block after it, and the
lines without ``$`` of a console block, must be what it printed (``...`` for anything). A block that cannot run
here is marked in the line above: ``<!-- not run: why -->`` never runs, ``<!-- needs: flwr -->`` where that package is.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import forking
import spearpp

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
RUN = ("python", "bash", "console")
SHOWN = ("output", "text", "yaml", "json")
"""What is only to be read."""
NOT_RUN = {
    ("start.md", "make demo"): "needs a clone and make",
    ("start.md", "make venv"): "needs a clone and make",
    ("howto.md", "spearpp audit --device cuda mine/update.safetensors"): "needs a GPU",
}
"""Every block that no test runs, by its first line. A new one has to be entered here."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    mark: str

    @property
    def needs(self) -> str | None:
        """The package it cannot do without."""
        return self.mark.removeprefix("needs:").strip() if self.mark.startswith("needs:") else None

    @property
    def runs(self) -> bool:
        if self.language not in RUN or self.mark.startswith("not run:"):
            return False
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start, language, mark = None, "", ""
    for number, line in enumerate(lines, 1):
        fence = re.fullmatch(r"\s*```(.*)", line)
        if fence and start is None:
            start, language = number, fence[1].strip()
            above = re.fullmatch(r"\s*<!-- (.*) -->", lines[number - 2]) if number > 1 else None
            mark = above[1] if above else ""
        elif fence and start is not None:
            found.append(Block(page, start, language, "\n".join(lines[start : number - 1]), mark))
            start = None
    assert start is None, f"{page.name}:{start}: a fence that does not end"
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def environment(place: Path) -> dict[str, str]:
    """One thread, this checkout, no network, and programs in ``place``."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "NO_MKDOCS_2_WARNING": "1",
        "http_proxy": "http://127.0.0.1:9",  # nobody listens: what asks the network fails
        "https_proxy": "http://127.0.0.1:9",
    }


def run(place: Path, *command: str, folder: Path | None = None) -> str:
    """Run a program and return what it said."""
    done = subprocess.run(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=environment(place),
        cwd=folder or place,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def command(forking_server: str) -> Path:
    """A folder with ``spearpp`` in it, which runs the command in a fork of one process."""
    client = Path(forking_server).with_name("spearpp")
    script = forking.CLIENT.format(socket=forking_server, arguments="sys.argv[1:]")
    client.write_text(f"#!{sys.executable} -IS{script}")
    client.chmod(0o755)
    return client.parent


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.page == page and block.runs for block in ALL)],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run_and_print_what_they_say(page: Path, tmp_path: Path, command: Path) -> None:
    own = [block for block in ALL if block.page == page and (block.runs or block.language == "output")]
    content = [{"where": str(each), "language": each.language, "code": each.code} for each in own]
    (tmp_path / "page.json").write_text(json.dumps(content))
    said = run(command, str(command / "spearpp"), "--page", "page.json", folder=tmp_path)
    assert said.count("done ") == len(content)


@pytest.mark.parametrize("block", [block for block in ALL if block.needs], ids=str)
def test_a_block_that_needs_a_package_runs_where_it_is(block: Block) -> None:
    assert block.language in RUN
    if not block.runs:
        pytest.skip(f"{block.needs} is not installed: {block} was not run")


def test_every_block_runs_but_those_that_are_named() -> None:
    unknown = [str(block) for block in ALL if block.language not in RUN + SHOWN]
    assert not unknown, f"say what language these are in: {unknown}"
    silent = [block for block in ALL if block.language in RUN and not block.runs and block.needs is None]
    reasons = {(block.page.name, block.code.splitlines()[0]): block.mark.removeprefix("not run: ") for block in silent}
    assert reasons == NOT_RUN
    marks = sum(len(re.findall(r"^\s*<!-- (?:not run|needs): ", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert marks == len([block for block in ALL if block.mark]), "a mark that stands above no block"
    assert sum(block.runs for block in ALL) > 20


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_run_and_are_kept_without_results(notebook: Path, tmp_path: Path) -> None:
    for module in ("ipykernel", "nbclient", "nbformat"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: {notebook.name} was not run")
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    code = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
print("printed", sum(len(cell.get("outputs", [])) for cell in book.cells))
"""
    said = run(tmp_path, sys.executable, "-c", code, str(notebook))
    assert re.search(r"printed [1-9]", said)


def test_there_are_two_notebooks() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == ["compare-searches", "first-audit"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does; strict, so links and anchors that lead nowhere fail it."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: the site was not built")
    place = tmp_path_factory.mktemp("docs")
    build = ("mkdocs", "build", "--strict", "--site-dir", str(place / "site"))
    run(place, sys.executable, "-m", *build, folder=ROOT)
    return place / "site"


def test_the_site_asks_nothing_of_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES) - 1
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*", page.read_text())
        loaded += re.findall(r"<link\b[^>]*\bhref=\"(?:https?:)?//[^\"]*", page.read_text())
        assert not loaded, f"{page.name}: {loaded}"


def test_the_reference_has_everything_public_and_its_shapes(site: Path) -> None:
    page = (site / "api.html").read_text()
    wanted = {*spearpp.__all__} - {"report", "search", "simulate"}
    for module in (spearpp.report, spearpp.search, spearpp.search.losses, spearpp.search.rounding, spearpp.simulate):
        wanted |= {*getattr(module, "__all__", [])}
    headings = set(re.findall(r'<h3 id="spearpp\.(?:\w+\.)*(\w+)"', page))
    named = set(re.findall(r"<code>spearpp\.report\.(\w+)</code>", page))  # constants, which are only said to be there
    assert not sorted(wanted - headings - named)
    plain = re.sub(r"<[^>]+>", "", page)
    assert "Float[Tensor, 'k n']" in plain.replace("&#39;", "'").replace("&quot;", "'")
    assert "&gt;&gt;&gt; " in plain
    assert "<blockquote>" not in page, "an example that reads as a quotation"


def test_the_page_about_the_report_names_every_field_of_the_schema() -> None:
    text = (ROOT / "docs" / "report.md").read_text()
    schema = json.loads((ROOT / "src" / "spearpp" / "report" / "report.schema.json").read_text())
    tables = {
        "## report.json": schema,
        "### A layer": schema["$defs"]["layer"],
        "### An inversion": schema["$defs"]["inversion"],
    }
    for heading, form in tables.items():
        part = text.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
        named = re.findall(r"^\| `(\w+)`", part, re.MULTILINE)
        assert named == list(form["properties"]), heading
    codes = dict(re.findall(r"^\| (\d+) \| (.*) \|$", text.split("## Exit codes\n", 1)[1], re.MULTILINE))
    console_source = (ROOT / "src" / "spearpp" / "cli" / "console.py").read_text()
    exits = re.findall(r'^[A-Z_]+ = (\d+)\n"""Exit code', console_source, re.MULTILINE)
    assert sorted(codes) == sorted(["0", *exits])


def test_nobodys_machine_is_in_the_documentation() -> None:
    for file in [*PAGES, *NOTEBOOKS, ROOT / "mkdocs.yml"]:
        assert not re.search(r"/(?:work|tmp|home|root)/|https?://(?:pypi|files\.python)", file.read_text()), file.name
