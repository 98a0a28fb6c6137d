"""The report as a person sees it, in a real browser: opened from disk, at two widths, filtered, sorted, printed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import spearpp
from spearpp import report, simulate
from spearpp.report import timeline
from spearpp.report.pdf import print_pdf

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
QUIET += ["--disable-component-update"]


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no chromium, and CI=true: the report must be seen in a browser there")
        pytest.skip("no chromium here: apt-get install chromium, to see the report in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, chromium_sandbox=False)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(1)
    batch = simulate.photographs(12, generator=generator)
    model = simulate.mlp(3072, [100, 100], 10, generator=generator)
    result = spearpp.audit(simulate.FedSGD()(model, batch), model)
    return report.write(tmp_path_factory.mktemp("report"), result, truth=batch, command=["spearpp", "audit", "x"])


class Watched:
    """A page and everything that went wrong on it."""

    def __init__(self, browser: "Browser", file: Path, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.resolve().as_uri())

    def visible(self) -> list[int]:
        """The numbers of the samples that are shown, in their order."""
        return self.page.eval_on_selector_all(
            "#cards .sample", "all => all.filter(e => e.offsetParent !== null).map(e => Number(e.dataset.number))"
        )


@pytest.fixture
def watched(browser: "Browser", page_file: Path) -> Iterator[Watched]:
    made = Watched(browser, page_file, viewport={"width": 1280, "height": 900})
    yield made
    assert made.problems == []
    outside = [url for url in made.requests if not url.startswith(("file:", "data:"))]
    assert outside == []
    made.context.close()


def test_it_opens_from_disk_with_every_picture_visible(watched: Watched) -> None:
    sizes = watched.page.eval_on_selector_all(
        "img", "all => all.map(e => [e.complete, e.naturalWidth, e.getBoundingClientRect().width])"
    )
    assert len(sizes) == 24
    assert all(complete and natural == 32 and shown >= 40 for complete, natural, shown in sizes)
    assert "12 of 12 training samples were recovered (each is exactly" in watched.page.inner_text("h1")
    assert watched.visible() == list(range(1, 13))


def test_samples_are_filtered_and_sorted(watched: Watched) -> None:
    page = watched.page
    labels = page.eval_on_selector_all("#cards .sample", "all => all.map(e => e.dataset.label)")
    some = labels[0]
    page.select_option("#label", some)
    assert len(watched.visible()) == labels.count(some)
    assert page.inner_text("#count") == f"{labels.count(some)} shown"
    page.select_option("#label", "")
    page.eval_on_selector("#cards .sample", "first => first.dataset.state = 'another'")
    page.select_option("#filter", "one sample or a mean")
    assert watched.visible() == list(range(2, 13))
    page.select_option("#filter", "")
    page.select_option("#sort", "psnr")
    order = page.eval_on_selector_all("#cards .sample", "all => all.map(e => Number(e.dataset.psnr))")
    assert order == sorted(order)
    page.select_option("#sort", "error")
    order = page.eval_on_selector_all("#cards .sample", "all => all.map(e => Number(e.dataset.error))")
    assert order == sorted(order, reverse=True)
    page.select_option("#sort", "number")
    assert watched.visible() == list(range(1, 13))


def test_numbers_come_on_demand(watched: Watched) -> None:
    first = watched.page.locator("#cards .sample").first
    assert not first.locator("dl").is_visible()
    first.locator("summary").click()
    assert first.locator("dl").is_visible()
    assert "One training sample, or the mean of samples that differ from it by at most" in first.inner_text()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_phones_and_desks_by_day_and_night(
    browser: "Browser", page_file: Path, width: int, scheme: str
) -> None:
    made = Watched(browser, page_file, viewport={"width": width, "height": 800}, color_scheme=scheme)
    overflow = made.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0
    ink, paper = (
        made.page.evaluate(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number).slice(0, 3)")
        for name in ("color", "backgroundColor")
    )
    assert contrast(ink, paper) >= 7
    assert (sum(paper) < sum(ink)) == (scheme == "dark")
    assert made.problems == []
    made.context.close()


def contrast(a: list[float], b: list[float]) -> float:
    """Contrast ratio of two colours as the WCAG defines it."""

    def luminance(colour: list[float]) -> float:
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_it_prints(watched: Watched, tmp_path: Path) -> None:
    watched.page.emulate_media(media="print")
    assert not watched.page.locator(".controls").is_visible()
    assert not watched.page.locator("nav").is_visible()
    assert watched.page.locator("#cards img").first.is_visible()
    content = watched.page.pdf(path=str(tmp_path / "report.pdf"), format="A4")
    assert content.startswith(b"%PDF")
    assert 1 <= content.count(b"/Type /Page\n") + content.count(b"/Type /Page ") <= 8


def test_a_screen_reader_finds_its_way(watched: Watched) -> None:
    tree = watched.page.locator("body").aria_snapshot()
    assert 'heading "Recovered samples" [level=2]' in tree
    assert 'img "Recovered sample 1' in tree
    assert 'combobox "Sort by"' in tree
    assert 'img "Singular values of the layer' in tree


@pytest.mark.parametrize("width", [390, 1280])
def test_a_timeline_with_hostile_names_fits_and_runs_nothing(browser: "Browser", tmp_path: Path, width: int) -> None:
    hostile = "<script>document.title = 1</script>" + "A" * 5000
    leaks = [
        timeline.Entry("2026-11-18T10:00:00", f"round {n}", "LEAKS", "leaks", n, 9, report=f"r{n}") for n in range(9)
    ]
    file = timeline.add(tmp_path, [*leaks, timeline.Entry("2026-11-18T10:00:00", hostile, None, hostile)])
    made = Watched(browser, file, viewport={"width": width, "height": 800})
    assert made.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert made.page.title() == "9 of 9 updates leak: spearpp timeline"
    assert made.page.locator("svg circle.leak").count() == 8 + 1, "eight updates with recovered inputs, and the legend"
    assert made.problems == []
    made.context.close()


def test_the_report_is_printed_to_a_pdf(page_file: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    printed = print_pdf(page_file)
    assert printed.name == "report.pdf"
    assert printed.read_bytes().startswith(b"%PDF")
