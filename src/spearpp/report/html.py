"""Render ``report.html``: one file that loads nothing else."""

from collections.abc import Mapping
from typing import Any

import jinja2

from spearpp.auditing import AuditResult, ClaimKind, Verdict
from spearpp.auditing.folder import Redaction
from spearpp.dp import probability
from spearpp.metrics import Score
from spearpp.model import Layer
from spearpp.pictures import data_uri, png
from spearpp.report import plots
from spearpp.report.data import data
from spearpp.report.decision import count_checks
from spearpp.report.glossary import explained, glossary
from spearpp.report.presentation import Presentation, shown_width, shows_features
from spearpp.report.wording import LABELS, LAYER_INPUTS, evidence, headline, number
from spearpp.types import Tensor

MAX_SAMPLES = 1000
"""Largest number of samples on a page. Design choice: a browser opens such a page quickly."""
MAX_WORDS = 20_000
"""Largest number of words of a table on a page. Design choice: a browser opens such a page quickly."""
MAX_FILES = 20
"""Largest number of audited files on a page. Design choice: they stay readable. ``report.json`` has up to 1000."""
MAX_TEXT_LENGTH = 300
"""Characters shown of a name. Design choice: a long path fits, and a hostile name cannot fill the page."""
MAX_UNNAMED_COLUMNS = 40
"""Largest number of columns of a table without column names. Design choice: wider tables are hard to read."""
HIDDEN_FACTS = ("claim", "certified", "label", "why")
"""Fields of a sample that the page shows elsewhere than among the numbers of its evidence."""


def page(
    result: AuditResult,
    content: Mapping[str, Any],
    presentation: Presentation,
    originals: Tensor | None,
    compared: Score | None,
    redact: Redaction,
) -> str:
    """Render the report as HTML.

    The inputs of the audit are already redacted. ``content`` is that of ``report.json``. ``originals`` are the client's
    true inputs, if they are known and may be shown.
    """
    samples = _samples(result, content, presentation, originals, compared)
    if redact == "omit":
        samples = [{**each, "label": None} for each in samples]
    lists: dict[str, Any] = {"source": [], "versions": {}, "files": []}
    absent = ("truth_not_compared", "received", "threat_model", "command", "date", "client", "model", "dp")
    columns, features = _columns(result, presentation), shows_features(result)
    return template("report.html").render(
        result=result,
        content={**dict.fromkeys(absent), **lists, **content},
        leaks=result.verdict is Verdict.LEAKS,
        headline=headline(result),
        layer_inputs=LAYER_INPUTS,
        samples=samples[:MAX_SAMPLES],
        not_shown=max(0, len(samples) - MAX_SAMPLES),
        missed=_missed(presentation, originals, compared),
        states=list(dict.fromkeys(each["state"] for each in samples)),
        labels=sorted({each["label"] for each in samples if each["label"] is not None}),
        shape=presentation.shape,
        records=presentation.shape is None or not columns or features,
        columns=columns,
        scaled=presentation.shape is not None and not presentation.mean,
        plots=_plots(result),
        rounds_plot=None if result.history is None else plots.rounds(result.history),
        measured=None if result.shown is None else _measured(result.shown.layer),
        defences=data("defences.json"),
        redact=redact,
        compared=compared,
        features=features,
        most_samples=MAX_SAMPLES,
        most_words=MAX_WORDS,
        counts=count_checks(content["checks"]),
        most_files=MAX_FILES,
        glossary=glossary({name for each in samples for name in (each["claim"], *each["facts"])}),
        explained=explained,
    )


def _measured(layer: Layer) -> tuple[str, float]:
    """Return a kind of layers, and the largest number of samples per neuron that were recovered from such a layer.

    Measured: docs/results/heads.md (48 of 100), equations.md (140 of 200) and README.md (90 of 200).
    """
    if layer.output:
        return "an output layer of 100 classes", 0.48
    return ("GELU and three hidden layers", 0.7) if layer.equations else ("ReLU", 0.45)


def template(name: str) -> jinja2.Template:
    """Return the template of a page. It escapes every text."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("spearpp.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    made.filters.update(number=number, probability=probability, short=_short)
    return made.get_template(name)


def _short(text: object) -> str:
    whole = str(text)
    return whole if len(whole) <= MAX_TEXT_LENGTH else whole[:MAX_TEXT_LENGTH] + "…"


def _columns(result: AuditResult, presentation: Presentation) -> list[str]:
    """Return the names of the columns to show: the given ones, or x0, x1, ..."""
    width = shown_width(result)
    names = list(presentation.columns) if len(presentation.columns) == width else []
    return names or [f"x{index}" for index in range(min(width, MAX_UNNAMED_COLUMNS))]


def _samples(
    result: AuditResult,
    content: Mapping[str, Any],
    presentation: Presentation,
    originals: Tensor | None,
    compared: Score | None,
) -> list[dict[str, Any]]:
    """Return what the page shows of each sample: recovered inputs first, then inputs that fit without proof."""
    layer = result.shown
    if layer is None or layer.inversion is None:
        return []
    documented = next(each for each in content["layers"] if each["name"] == layer.layer.name)["inversion"]["samples"]
    fitting = [row for row, each in enumerate(layer.claims) if each.kind in (ClaimKind.SEVERAL, ClaimKind.FITS)]
    rows = [*(result.rows.tolist() if layer is result.best else []), *fitting]
    inputs = layer.inversion.inputs[rows]
    shown = inputs if shows_features(result) else presentation.own_scale(inputs)
    truth = None if originals is None else presentation.own_scale(originals)
    matches = _matches(compared)
    width = len(_columns(result, presentation))
    samples = []
    for position, row in enumerate(rows):
        facts = documented[row]
        style, state, words = evidence(facts, layer.inversion.scale_known)
        true_row, psnr = matches.get(position, (None, None))
        original = None if truth is None or true_row is None else truth[true_row]
        samples.append(
            {
                "number": position + 1,
                "style": style,
                "state": state,
                "words": words,
                "claim": facts["claim"],
                "label": facts["label"],
                "psnr": psnr,
                "facts": {LABELS.get(name, name): value for name, value in facts.items() if name not in HIDDEN_FACTS},
                "error": facts.get("error"),
                "picture": _picture(shown[position], presentation, result),
                "original": None if original is None else _picture(original, presentation, result),
                "values": shown[position].tolist()[:width],
                "truth": None if original is None else original.tolist()[:width],
            }
        )
    return samples


def _matches(compared: Score | None) -> dict[int, tuple[int, float]]:
    """Map each recovered row to the true row that it was assigned to, and its PSNR."""
    if compared is None:
        return {}
    pairs = enumerate(compared.assignment.tolist())
    return {row: (true_row, float(compared.psnr[true_row])) for true_row, row in pairs if row >= 0}


def _missed(presentation: Presentation, originals: Tensor | None, compared: Score | None) -> list[dict[str, Any]]:
    """Return the true samples that no recovered input was assigned to."""
    if originals is None or compared is None or presentation.shape is None:
        return []
    rows = (compared.assignment < 0).nonzero()[:, 0].tolist()
    truth = presentation.own_scale(originals)
    return [
        {"number": row + 1, "original": data_uri(png(truth[row], presentation.shape))} for row in rows[:MAX_SAMPLES]
    ]


def _picture(values: Tensor, presentation: Presentation, result: AuditResult) -> str | None:
    if presentation.shape is None or not len(values) or shows_features(result):
        return None
    return data_uri(png(values, presentation.shape))


def _plots(result: AuditResult) -> list[dict[str, str]]:
    """Return the plots of the shown layer as SVG, each with its caption."""
    layer = result.shown or next((each for each in result.layers if each.inversion is not None), None)
    if layer is None or layer.inversion is None:
        return []
    inversion = layer.inversion
    spectrum = plots.spectrum(inversion.spectrum.tolist(), inversion.batch_size)
    sparsity = plots.sparsity(inversion.zeros.tolist(), layer.layer.neurons, inversion.batch_size)
    figures = {
        "Singular values of the gradient. The number of large values equals the number of samples.": spectrum,
        "Share of the neurons that receive no gradient from each candidate input. Wrong ones have a small share.": (
            sparsity
        ),
    }
    return [{"caption": caption, "svg": svg} for caption, svg in figures.items() if svg]
