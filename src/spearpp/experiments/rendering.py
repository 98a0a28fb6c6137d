"""Tables of results as text: the same cells for the console, Markdown and HTML."""

import html
from collections.abc import Sequence

from spearpp.experiments.intervals import Interval
from spearpp.experiments.reproduce import Reproduction, Result

COLUMNS = (
    *("method", "b", "m", "paper: accuracy", "PSNR", "accuracy (95 %)", "all inputs", "PSNR (95 %)"),
    *("certified (wrong)", "batches", "starts: at most", "median", "seconds"),
)
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:14px}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}tr.ours{background:#eef5fb}img,svg{max-width:100%;height:auto}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}tr.ours{background:#1d2a36}
td,th{border-color:#444}svg{background:#fff}}"""


def lines(reproduction: Reproduction) -> list[tuple[str, ...]]:
    """One tuple of texts a row, in the order of COLUMNS."""
    return [_line(each) for each in reproduction.results]


def notes(reproduction: Reproduction) -> list[str]:
    """What a reader must know to compare: data, scale, starts, threshold, code, what is missing."""
    table = reproduction.table
    thresholds = sorted({row.setting.threshold for row in table.rows})
    said = [
        f"{table.reference}. Accuracy: batches with mean PSNR over {', '.join(f'{each:g}' for each in thresholds)} dB; "
        "all inputs: batches with every input over it.",
        f"Data: {reproduction.data}; the paper: CIFAR-10, 100 batches, 1,000,000 starts. "
        f"Measured by {reproduction.code}, commit {', '.join(reproduction.commits)}"
        + (f", on {', '.join(reproduction.devices)}." if reproduction.devices else "."),
    ]
    if reproduction.data != "cifar10":
        said.append("These are not the paper's images: pass --data cifar10 to compare with its numbers.")
    if table.left_out:
        said.append(f"{table.left_out} rows of the paper are left out of this run.")
    missing = sum(each.wanted - each.batches for each in reproduction.results)
    if missing:
        are = "batch is" if missing == 1 else "batches are"
        said.append(f"{missing} {are} not measured yet: run the same command again to go on.")
    if reproduction.stale:
        said.append(f"{reproduction.stale} batches measured by other code versions are in the store and not counted.")
    return said


def markdown(reproduction: Reproduction) -> str:
    """A Markdown page."""
    table = [COLUMNS, tuple("---" for _ in COLUMNS), *lines(reproduction)]
    body = "\n".join("| " + " | ".join(each) + " |" for each in table)
    said = "\n\n".join(notes(reproduction))
    return f"# {reproduction.table.name}: {reproduction.table.title}\n\n{body}\n\n{said}\n"


def page(reproduction: Reproduction, figures: Sequence[str] = ()) -> str:
    """An HTML page that needs nothing beside it; ``figures`` are inline SVG or img elements."""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in COLUMNS)
    rows = "".join(
        f"<tr{' class=ours' if result.row.ours else ''}>"
        + "".join(f"<td>{html.escape(each)}</td>" for each in line)
        + "</tr>"
        for result, line in zip(reproduction.results, lines(reproduction), strict=True)
    )
    title = html.escape(f"{reproduction.table.name}: {reproduction.table.title}")
    said = "".join(f"<p>{html.escape(each)}</p>" for each in notes(reproduction))
    return document(title, f"<table><tr>{head}</tr>{rows}</table>{said}{''.join(figures)}")


def document(title: str, body: str) -> str:
    """The frame of a page; both texts are HTML already."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1>{body}</body></html>\n"
    )


def share(interval: Interval | None) -> str:
    """A share in % with its interval.

    >>> share(Interval(0.5, 0.31, 0.69))
    '50 % (31 to 69)'
    """
    if interval is None:
        return "-"
    return f"{100 * interval.value:.0f} % ({100 * interval.low:.0f} to {100 * interval.high:.0f})"


def _line(each: Result) -> tuple[str, ...]:
    setting, claim = each.row.setting, each.row.claim
    psnr = "-" if each.psnr is None else f"{each.psnr.value:.1f}"
    if each.psnr is not None and each.psnr.low == each.psnr.low:
        psnr += f" ({each.psnr.low:.1f} to {each.psnr.high:.1f})"
    if each.with_masks is not None:
        psnr += f"; with true masks {each.with_masks:.1f}"
    return (
        each.row.name + (f", {each.row.note}" if each.row.note else ""),
        str(setting.b),
        str(setting.m),
        f"{claim.accuracy:g} %" if claim else "-",
        f"{claim.psnr:.1f}" if claim else "-",
        share(each.accuracy),
        "-" if each.exact is None else f"{100 * each.exact.value:.0f} %",
        psnr,
        f"{each.certified} of {each.inputs} ({each.wrong})" if each.batches else "-",
        f"{each.batches} of {each.wanted}",
        f"{setting.search.starts:,}",
        "-" if each.starts is None else f"{each.starts:,.0f}",
        "-" if each.seconds is None else f"{each.seconds:.2f}",
    )
