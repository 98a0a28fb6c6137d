"""The page: one file that needs nothing else."""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from spearpp.auditing import AuditResult, Kind, LayerAudit, Verdict
from spearpp.auditing.folder import Redaction
from spearpp.errors import MissingExtraError
from spearpp.metrics import Score
from spearpp.pictures import data_uri
from spearpp.report import plots
from spearpp.report.advice import advice, defences
from spearpp.report.presentation import Presentation
from spearpp.report.wording import evidence, headline, meaning, number, sees
from spearpp.types import Tensor

PICTURES = 1000
"""Samples that are shown at most."""
COLUMNS = 40
"""Columns of records without names that are shown at most."""


def page(
    result: AuditResult,
    content: Mapping[str, Any],
    presentation: Presentation,
    originals: Tensor | None,
    compared: Score | None,
    redact: Redaction,
) -> str:
    """The report as HTML.

    Args:
        result: the audit, redacted already where it is to be.
        content: what ``report.json`` holds.
        presentation: how inputs are shown.
        originals: the client's own inputs, where they are given and may be shown.
        compared: what came back against them.
        redact: what was done to the inputs.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("jinja2", "report") from error
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = number
    samples = _samples(result, content, presentation, originals, compared)
    if redact == "omit":
        samples = [{**each, "label": None} for each in samples]
    return environment.get_template("report.html").render(
        content={"received": None, "source": [], "threat_model": None, "command": None, "versions": {}, **content},
        verdict=result.verdict,
        leaks=result.verdict is Verdict.LEAKS,
        headline=headline(result),
        meaning=meaning(result),
        layers=[_layer(each) for each in result.layers],
        samples=samples[:PICTURES],
        hidden=max(0, len(samples) - PICTURES),
        missed=_missed(presentation, originals, compared),
        states=list(dict.fromkeys(each["state"] for each in samples)),
        labels=sorted({each["label"] for each in samples if each["label"] is not None}),
        shape=presentation.shape,
        records=presentation.shape is None or not _columns(result, presentation) or _features(result),
        columns=_columns(result, presentation),
        scaled=presentation.shape is not None and not presentation.mean,
        plots=_plots(result),
        advice=advice(result),
        defences=defences(),
        redact=redact,
        compared=compared,
        features=_features(result),
    )


def _template(name: str) -> str:
    return resources.files("spearpp.report").joinpath("templates", name).read_text("utf-8")


def _features(result: AuditResult) -> bool:
    return result.shown is not None and result.shown.layer.sees == "features"


def _columns(result: AuditResult, presentation: Presentation) -> list[str]:
    shown = result.shown
    count = 0 if shown is None or shown.inversion is None else shown.inversion.inputs.shape[1]
    names = list(presentation.columns) if len(presentation.columns) == count else []
    return names or [f"x{index}" for index in range(min(count, COLUMNS))]


def _layer(audited: LayerAudit) -> dict[str, Any]:
    layer, inversion = audited.layer, audited.inversion
    return {
        "name": layer.name,
        "size": f"{layer.neurons} x {layer.features}",
        "sees": sees(layer.sees),
        "feasible": audited.feasible,
        "batch_size": audited.batch_size,
        "recovered": audited.recovered,
        "approximate": audited.approximate,
        "fitting": audited.fitting,
        "reason": audited.reason,
        "witness": "" if inversion is None else inversion.next_layer,
        "seconds": None if inversion is None else sum(inversion.stats.seconds.values()),
        "starts": None if inversion is None else inversion.stats.starts,
    }


def _samples(
    result: AuditResult,
    content: Mapping[str, Any],
    presentation: Presentation,
    originals: Tensor | None,
    compared: Score | None,
) -> list[dict[str, Any]]:
    best = result.shown
    if best is None or best.inversion is None:
        return []
    told = next(each for each in content["layers"] if each["name"] == best.layer.name)["inversion"]["samples"]
    others = [row for row, each in enumerate(best.claims) if each.kind in (Kind.SEVERAL, Kind.FITS)]
    rows = [*(result.rows.tolist() if best is result.best else []), *others]
    inputs = best.inversion.inputs[rows]
    shown = inputs if _features(result) else presentation.own_scale(inputs)
    true = None if originals is None else presentation.own_scale(originals)
    psnr, of = _matches(compared, len(shown))
    samples = []
    for place, row in enumerate(rows):
        facts = told[row]
        style, state, words = evidence(facts, best.inversion.scale_known)
        original = true[of[place]] if true is not None and of[place] is not None else None
        samples.append(
            {
                "number": place + 1,
                "style": style,
                "state": state,
                "words": words,
                "label": facts["label"],
                "psnr": psnr[place],
                "facts": {name: value for name, value in facts.items() if name not in ("certified", "label", "why")},
                "error": facts.get("error"),
                "picture": _picture(shown[place], presentation, result),
                "original": None if original is None else _picture(original, presentation, result),
                "values": shown[place].tolist()[: len(_columns(result, presentation))],
                "truth": None if original is None else original.tolist()[: len(_columns(result, presentation))],
            }
        )
    return samples


def _matches(compared: Score | None, count: int) -> tuple[list[float | None], list[int | None]]:
    """For each recovered input, its PSNR and the true sample it was assigned to."""
    psnr: list[float | None] = [None] * count
    of: list[int | None] = [None] * count
    if compared is not None:
        for true, row in enumerate(compared.assignment.tolist()):
            if row >= 0:
                psnr[row], of[row] = float(compared.psnr[true]), true
    return psnr, of


def _missed(presentation: Presentation, originals: Tensor | None, compared: Score | None) -> list[dict[str, Any]]:
    """The client's inputs that nothing was assigned to."""
    if originals is None or compared is None or presentation.shape is None:
        return []
    rows = (compared.assignment < 0).nonzero()[:, 0].tolist()
    true = presentation.own_scale(originals)
    return [{"number": row + 1, "original": data_uri(true[row], presentation.shape)} for row in rows[:PICTURES]]


def _picture(values: Tensor, presentation: Presentation, result: AuditResult) -> str | None:
    if presentation.shape is None or not len(values) or _features(result):
        return None
    return data_uri(values, presentation.shape)


def _plots(result: AuditResult) -> Sequence[str]:
    best = result.shown or next((each for each in result.layers if each.inversion is not None), None)
    if best is None or best.inversion is None:
        return []
    inversion = best.inversion
    made = [
        plots.spectrum(inversion.spectrum.tolist(), inversion.batch_size),
        plots.sparsity(inversion.zeros.tolist(), best.layer.neurons, inversion.batch_size),
    ]
    return [each for each in made if each]
