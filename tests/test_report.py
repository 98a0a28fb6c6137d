"""An audit as a folder: it can be read again, its page is right, and inputs are redacted if required."""

import base64
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import spearpp
from clients import gradient_of
from conftest import batch_and_model, present
from spearpp import AuditResult, SpearError, Verdict, pictures, report, simulate
from spearpp.auditing import ClaimKind
from spearpp.auditing.folder import DOCUMENT, NUMBERS
from spearpp.cli.audit import exit_code
from spearpp.inversion.result import Inversion
from spearpp.report import plots
from spearpp.report.data import data
from spearpp.report.sarif import sarif_log
from spearpp.report.wording import headline
from spearpp.simulate import Batch

ROOT = Path(__file__).parents[1]
Audited = tuple[AuditResult, Batch]


@pytest.fixture(scope="module")
def photographs() -> Audited:
    generator = torch.Generator().manual_seed(1)
    batch = simulate.photographs(12, generator=generator)
    model = simulate.mlp(3072, [100, 100], 10, generator=generator)
    return spearpp.audit(simulate.FedSGD()(model, batch), model), batch


@pytest.fixture(scope="module")
def records() -> Audited:
    generator = torch.Generator().manual_seed(2)
    batch = simulate.breast_cancer(6, generator=generator)
    model = simulate.mlp(30, [90, 90], 2, generator=generator)
    return spearpp.audit(simulate.FedSGD()(model, batch), model), batch


def same(a: AuditResult, b: AuditResult) -> bool:
    """Whether two audits hold the same."""
    tensors = all(
        torch.equal(x.inversion.inputs, y.inversion.inputs)
        and torch.equal(x.inversion.directions, y.inversion.directions)
        and torch.equal(x.inversion.spectrum, y.inversion.spectrum)
        and (x.labels is None) == (y.labels is None)
        and (x.labels is None or y.labels is None or torch.equal(x.labels, y.labels))
        for x, y in zip(a.layers, b.layers, strict=True)
        if x.inversion is not None and y.inversion is not None
    )
    return tensors and a.to_dict() == b.to_dict()


def test_a_saved_audit_comes_back_as_it_was(tmp_path: Path, photographs: Audited, nothing: AuditResult) -> None:
    for name, result in (("leak", photographs[0]), ("nothing", nothing)):
        result.save(tmp_path / name)
        assert same(AuditResult.load(tmp_path / name), result)
    loaded = AuditResult.load(tmp_path / "leak")
    assert torch.equal(loaded.layers[0].is_recovered, photographs[0].layers[0].is_recovered)
    assert loaded.best is not None


def test_what_two_layers_certify_comes_back_too(tmp_path: Path) -> None:
    batch, model = batch_and_model(44, 60, [100, 100], seed=3)
    result = spearpp.audit(simulate.FedSGD()(model, batch), model, budget=20)
    assert result.layers[0].exact == 44
    result.save(tmp_path)
    assert same(AuditResult.load(tmp_path), result)


def test_the_document_keeps_to_its_schema(
    tmp_path: Path, photographs: Audited, records: Audited, nothing: AuditResult
) -> None:
    schema = json.loads(resources.files("spearpp.report").joinpath("report.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    for result, truth in (photographs, records, (nothing, None)):
        report.write(tmp_path, result, truth=truth)
        content = json.loads((tmp_path / DOCUMENT).read_text())
        check.validate(content)
        with pytest.raises(jsonschema.ValidationError):
            check.validate({**content, "verdict": "SAFE"})


def test_every_key_of_the_document_is_documented(tmp_path: Path, photographs: Audited) -> None:
    schema = json.loads(resources.files("spearpp.report").joinpath("report.schema.json").read_text())
    report.write(tmp_path, photographs[0], truth=photographs[1])
    content = json.loads((tmp_path / DOCUMENT).read_text())
    assert set(content) <= set(schema["properties"])
    layer = schema["$defs"]["layer"]["properties"]
    assert set(content["layers"][0]) <= set(layer)
    assert all(each.get("description") for each in schema["properties"].values())


def test_a_folder_that_was_changed_is_refused(tmp_path: Path, photographs: Audited) -> None:
    photographs[0].save(tmp_path)
    numbers = tmp_path / NUMBERS
    content = numbers.read_bytes()
    numbers.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SpearError, match="does not belong"):
        AuditResult.load(tmp_path)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(version=1),
        lambda c: c.update(schema="other"),
        lambda c: c.update(verdict="SAFE"),
        lambda c: c.pop("layers"),
        lambda c: c["layers"][0].pop("neurons"),
        lambda c: c["layers"][0]["inversion"].update(evidence="hearsay"),
        lambda c: c["layers"][0]["inversion"]["stats"].update(extra=1),
        lambda c: c.update(replay=[]),
        lambda c: c.update(layers=7),
    ],
)
def test_a_damaged_document_is_one_clear_error(tmp_path: Path, photographs: Audited, change: Change) -> None:
    photographs[0].save(tmp_path)
    content = json.loads((tmp_path / DOCUMENT).read_text())
    change(content)
    (tmp_path / DOCUMENT).write_text(json.dumps(content))
    with pytest.raises(SpearError):
        AuditResult.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'{"schema": "spearpp-report"}'])
def test_what_is_no_document_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / DOCUMENT).write_bytes(content)
    with pytest.raises(SpearError):
        AuditResult.load(tmp_path)
    with pytest.raises(SpearError):
        AuditResult.load(tmp_path / "nowhere")


def pictures_of(page: str) -> list[numpy.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [numpy.array(Image.open(io.BytesIO(base64.b64decode(each)))) for each in found]


def test_the_page_shows_originals_beside_what_came_back(tmp_path: Path, photographs: Audited) -> None:
    page = report.write(tmp_path, photographs[0], truth=photographs[1]).read_text()
    shown = pictures_of(page)
    assert len(shown) == 24
    for original, recovered in zip(shown[::2], shown[1::2], strict=True):
        assert int(numpy.abs(original.astype(int) - recovered).max()) <= 1
    assert numpy.stack(shown).std() > 20  # and they show something
    assert "12 of 12 training samples were recovered (each is exactly" in page
    assert page.count("<h1>") == 1


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path, photographs: Audited) -> None:
    page = report.write(tmp_path, photographs[0]).read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "url(" not in page
    assert "@import" not in page


def test_every_picture_has_words_and_every_heading_its_place(
    tmp_path: Path, photographs: Audited, records: Audited, nothing: AuditResult
) -> None:
    for result, truth in (photographs, records, (nothing, None)):
        page = report.write(tmp_path, result, truth=truth).read_text()
        assert all('alt="' in tag and 'alt=""' not in tag for tag in re.findall(r"<img[^>]*>", page))
        levels = [int(level) for level in re.findall(r"<h([1-6])", page)]
        assert levels[0] == 1
        assert all(b <= a + 1 for a, b in pairwise(levels))
        assert all("<title>" in tag for tag in re.findall(r"<svg.*?</svg>", page, re.DOTALL))


def test_names_from_strangers_cannot_become_code(tmp_path: Path, photographs: Audited) -> None:
    evil = "<script>alert(1)</script>"
    layers = [replace(each, layer=replace(each.layer, name=each.layer.name + evil)) for each in photographs[0].layers]
    result = replace(photographs[0], layers=layers, caveats=[evil], summary=evil)
    page = report.write(tmp_path, result, command=["spearpp", evil], source=[evil]).read_text()
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page
    assert evil not in result._repr_html_()


@pytest.mark.parametrize("redact", ["blur", "omit"])
def test_redaction_leaves_nothing_of_the_inputs_in_any_file(
    tmp_path: Path, photographs: Audited, redact: report.Redaction
) -> None:
    result, truth = photographs
    shown = pictures_of(report.write(tmp_path, result, truth=truth, redact=redact).read_text())
    assert not (tmp_path / "truth.safetensors").exists()
    loaded = AuditResult.load(tmp_path)
    assert loaded.summary == result.summary
    if redact == "omit":
        assert shown == []
        assert loaded.inputs.shape == (12, 0)
        assert all(each.labels is None for each in loaded.layers)
    else:
        assert all(len(numpy.unique(each.reshape(-1, 3), axis=0)) <= 16 for each in shown)
        assert len(loaded.inputs[0].unique()) <= 48
    assert all(each.inversion is None or not each.inversion.directions.numel() for each in loaded.layers)
    again = report.rerender(tmp_path).read_text()
    assert len(pictures_of(again)) == (0 if redact == "omit" else 12)
    with pytest.raises(SpearError, match="redacted"):
        report.rerender(tmp_path, truth=truth)


def test_the_page_alone_can_be_redacted_later(tmp_path: Path, photographs: Audited) -> None:
    first = report.write(tmp_path, photographs[0], truth=photographs[1]).read_text()
    assert len(pictures_of(report.rerender(tmp_path).read_text())) == len(pictures_of(first))
    assert pictures_of(report.rerender(tmp_path, redact="omit").read_text()) == []
    assert report.rerender(tmp_path).read_text() == first


def test_records_are_shown_under_their_names_on_their_own_scale(tmp_path: Path, records: Audited) -> None:
    result, truth = records
    page = report.write(tmp_path, result, truth=truth).read_text()
    assert '<th scope="col">mean radius</th>' in page
    own = truth.normalisation.undo(truth.inputs)
    for value in own[:, 0].tolist():
        assert f"({value:.4g})" in page
    assert 'class="records"' in page
    hidden = report.write(tmp_path, result, truth=truth, redact="blur").read_text()
    first = f"{float(own[0, 0]):.4g}"
    assert any(first in cell for cell in re.findall(r"<td[^>]*>([^<]*)", page))
    assert not any(first in cell for cell in re.findall(r"<td[^>]*>([^<]*)", hidden))
    assert f"({first})" not in hidden


def test_labels_of_two_classes_are_told_by_the_sign(records: Audited) -> None:
    result, truth = records
    assert result.best is not None
    order = spearpp.score(present(result.best.inversion).inputs, truth.inputs).assignment
    assert torch.equal(present(result.best.labels)[order], truth.labels)
    assert present(result.replay).difference < 1e-5


def test_a_truth_of_another_shape_is_not_compared_and_the_report_says_so(tmp_path: Path, photographs: Audited) -> None:
    page = report.write(tmp_path, photographs[0], truth=simulate.random_batch(4, features=7)).read_text()
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["truth"] is None
    assert "the true inputs have 7" in content["truth_not_compared"]
    assert content["truth_not_compared"] in page
    assert "Comparison with the client" not in page


def test_a_gate_sees_one_result_for_a_leak_and_none_without(
    tmp_path: Path, photographs: Audited, nothing: AuditResult
) -> None:
    report.write(tmp_path, photographs[0], source=["a folder/update.safetensors"])
    log = json.loads((tmp_path / "report.sarif").read_text())
    assert log["version"] == "2.1.0"
    (result,) = log["runs"][0]["results"]
    assert result["ruleId"] in {rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]}
    assert result["level"] == "error"
    location = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert location == "a%20folder/update.safetensors"
    assert nothing.verdict is Verdict.NOT_APPLICABLE
    assert sarif_log(nothing.to_dict())["runs"][0]["results"] == []


def test_the_docs_show_the_same_defences_as_the_report() -> None:
    text = (ROOT / "docs" / "defences.md").read_text()
    for row in data("defences.json")["rows"]:
        assert f"| {row['defence']} | {row['leaks']} | {row['inputs']} | {row['psnr']} | {row['stops']} |" in text


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_png_files_hold_what_was_put_in(channels: int, height: int, width: int, seed: int) -> None:
    channels = 3 if channels == 2 else channels
    unit = torch.rand(channels * height * width, generator=torch.Generator().manual_seed(seed))
    read = numpy.array(Image.open(io.BytesIO(pictures.png(unit, (channels, height, width)))))
    wanted = (unit.reshape(channels, height, width) * 255).round().permute(1, 2, 0).numpy()
    assert numpy.array_equal(read.reshape(height, width, channels), wanted)


def test_plots_survive_odd_spectra() -> None:
    assert plots.spectrum([], 0) == ""
    assert plots.spectrum([1.0], 1) == ""
    assert "NaN" not in plots.spectrum([5.0, 1.0, 1e-300, 0.0], 2)
    assert plots.sparsity([], 10, 3) == ""
    assert "circle" in plots.sparsity([5, 6], 10, 2)


def test_notebooks_show_pictures(photographs: Audited, nothing: AuditResult) -> None:
    inversion = photographs[0].layers[0].inversion
    assert isinstance(inversion, Inversion)
    assert len(pictures_of(inversion._repr_html_())) == 12
    assert len(pictures_of(photographs[0]._repr_html_())) == 12
    assert pictures_of(nothing._repr_html_()) == []
    assert "GELU" in nothing._repr_html_()


def test_a_batch_file_comes_back(tmp_path: Path) -> None:
    for batch in (simulate.photographs(3), simulate.breast_cancer(4), simulate.random_batch(2, features=5)):
        batch.save(tmp_path / "truth.safetensors")
        loaded = Batch.load(tmp_path / "truth.safetensors")
        assert torch.equal(loaded.inputs, batch.inputs)
        assert torch.equal(loaded.labels, batch.labels)
        assert torch.equal(loaded.normalisation.mean, batch.normalisation.mean)
        assert (loaded.image_shape, loaded.feature_names) == (batch.image_shape, batch.feature_names)


def test_foreign_batches_are_read_and_odd_ones_refused(tmp_path: Path) -> None:
    file = tmp_path / "truth.npz"
    numpy.savez(file, x=numpy.ones((4, 1, 3, 3), numpy.float32), y=numpy.arange(4))
    assert Batch.load(file).image_shape == (1, 3, 3)
    for odd in (
        {"x": numpy.ones(4, numpy.float32)},
        {"x": numpy.full((2, 3), numpy.nan, numpy.float32)},
        {"x": numpy.ones((2, 3), numpy.int64)},
        {"x": numpy.ones((2, 3), numpy.float32), "y": numpy.arange(5)},
        {"x": numpy.ones((2, 3), numpy.float32), "mean": numpy.zeros(2), "std": numpy.ones(2)},
        {"z": numpy.ones((2, 3), numpy.float32)},
    ):
        numpy.savez(file, **odd)
        with pytest.raises(SpearError):
            Batch.load(file)


def test_inputs_that_fit_without_proof_are_never_silent(tmp_path: Path) -> None:
    """Verdict, exit code, JSON, SARIF and page say how many there are and why."""
    generator = torch.Generator().manual_seed(0)
    inputs = 285 + 0.1 * torch.randn(5, 64, generator=generator)
    model = simulate.mlp(64, [100], 1, generator=generator)
    loss = torch.nn.functional.mse_loss(model(inputs), torch.randn(5, 1, generator=generator))
    result = spearpp.audit(gradient_of(loss, model), model)
    assert (result.verdict, result.fitting) == ("NOT_FOUND", 1)
    assert "1 input fits the gradient of layer 0" in result.summary
    page = report.write(tmp_path, result).read_text()
    assert "One computed input fits this update" in page
    assert "fits, not certified" in page
    assert "data:image/png" in page
    content = json.loads((tmp_path / DOCUMENT).read_text())
    assert content["fitting"] == 1
    assert "mean of several samples" in content["why_not_certified"]
    log = json.loads((tmp_path / "report.sarif").read_text())["runs"][0]["results"]
    assert [(each["ruleId"], each["level"]) for each in log] == [("spearpp/unproved-inputs", "warning")]
    assert str(AuditResult.load(tmp_path).layers[0].claims) == str(result.layers[0].claims)  # nan is not equal to nan
    assert [exit_code(result, gate) for gate in ("leak", "certified", "never")] == [1, 0, 0]


def test_the_headline_says_exactly_only_if_the_claims_do(photographs: Audited) -> None:
    (best,) = [each for each in photographs[0].layers if each is photographs[0].best]
    for apart, exactly in ((0.001, True), (math.inf, False)):
        claims = tuple(replace(each, kind=ClaimKind.ONE_OR_MEAN, samples=math.nan, apart=apart) for each in best.claims)
        result = replace(photographs[0], layers=[replace(best, claims=claims)])
        assert ("each is exactly" in headline(result)) is exactly
        assert "mean of" in headline(result)
