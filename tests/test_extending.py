"""The five additions of docs/architecture.md do what the page says, without a change to the package.

The page defines a loss, a search, a reader, a client and a rule. The tests here take them from the page.
"""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import spearpp
from clients import distances
from spearpp import ClientUpdate, simulate
from spearpp.auditing import judge as judging
from spearpp.auditing.claims import ClaimKind
from spearpp.errors import DataError, OptionError
from spearpp.search import RiemannianAdam, Search
from spearpp.simulate import Batch
from spearpp.types import Tensor
from spearpp.update.files import READERS, open_tensors
from test_docs import ROOT, blocks


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the Python blocks of the page define."""
    names: dict[str, Any] = {"__name__": "architecture"}
    quiet, folder = contextlib.redirect_stdout(io.StringIO()), tmp_path_factory.mktemp("page")
    with contextlib.chdir(folder), quiet, patch.dict(READERS):
        for block in blocks(ROOT / "docs" / "architecture.md"):
            if block.language == "python":
                exec(block.code, names)  # noqa: S102
    return names


def model_and_batch(samples: int, *hidden: int) -> tuple[nn.Sequential, Batch]:
    model = simulate.mlp(30, list(hidden), 10, generator=torch.Generator().manual_seed(2))
    return model, simulate.random_batch(samples, features=30, generator=torch.Generator().manual_seed(1))


def recovers(inputs: Tensor, batch: Batch) -> bool:
    """Whether the rows are the samples of the batch in some order, to 1e-3 of their norm."""
    return len(inputs) == len(batch.inputs) and bool((distances(inputs, batch) <= 1e-3).all())


def test_a_new_loss_drives_riemannian_adam(page: dict[str, Any]) -> None:
    y = torch.linspace(-0.02, 0.02, 41, dtype=torch.float64)[None].requires_grad_()
    loss = page["Huber"]()
    torch.testing.assert_close(torch.autograd.grad(loss.value(y).sum(), y)[0], loss.gradient(y.detach()))
    model, batch = model_and_batch(6, 90, 90)
    search = RiemannianAdam(loss=loss, starts=2048)
    result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=search)
    assert result.missing == 0
    assert recovers(result.inputs, batch)


def test_a_new_search_recovers_a_batch_and_serves_an_audit(page: dict[str, Any]) -> None:
    search = page["Reweighted"]()
    assert isinstance(search, Search)
    with pytest.raises(OptionError, match="at least one start"):
        page["Reweighted"](starts=0)
    model, batch = model_and_batch(5, 90)
    result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=search)
    assert result.missing == 0
    assert recovers(result.inputs, batch)
    assert 0 < result.stats.starts <= search.starts
    audited = spearpp.audit(simulate.FedSGD()(model, batch), model, search=search, batch_size=5)
    assert audited.verdict is spearpp.Verdict.LEAKS
    assert recovers(audited.inputs, batch)


def test_a_new_reader_feeds_an_audit(page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, ".json", page["open_json"])
    model, batch = model_and_batch(4, 60)
    sent = simulate.FedSGD()(model, batch)
    path = tmp_path / "gradients.json"
    path.write_text(json.dumps({name: each.tolist() for name, each in sent.gradients.items()}))
    tensors, _ = open_tensors(path)
    assert [*tensors] == [*sent.gradients]
    result = spearpp.audit(ClientUpdate.from_gradients(model, tensors), model, batch_size=4)
    assert recovers(result.inputs, batch)
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match="not a JSON object"):
        open_tensors(path)


def test_a_new_kind_of_client_is_audited(page: dict[str, Any]) -> None:
    model, batch = model_and_batch(6, 90, 90)
    client = page["FedProx"]
    update = client(steps=3, rate=1e-3, proximal=0.1)(model, batch)
    assert update.steps == 3
    frozen, _ = model_and_batch(6, 90, 90)
    frozen[0].requires_grad_(False)
    moved = {
        name for name, each in client(steps=2, rate=1e-3, proximal=0.1)(frozen, batch).gradients.items() if each.any()
    }
    assert moved == set(update.gradients) - {"0.weight", "0.bias"}
    result = spearpp.audit(update, model)
    assert result.verdict is spearpp.Verdict.LEAKS
    assert recovers(result.inputs, batch)
    quantised = (client(steps=1, rate=1e-3, proximal=0.1) | simulate.TopK(0.5))(model, batch)
    assert any(bool((each == 0).any()) for each in quantised.gradients.values())


def test_a_new_rule_decides_what_an_audit_claims(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_and_batch(6, 90, 90)
    close = batch.inputs.clone()
    close[1] = close[0] + 0.5 * close[1]
    update = simulate.FedSGD()(model, replace(batch, inputs=close))
    before = spearpp.audit(update, model, batch_size=6).layers[0]
    assert before.exact == 6
    monkeypatch.setattr(judging, "claims_of", page["far_from_others"])
    result = spearpp.audit(update, model, batch_size=6)
    after = result.layers[0]
    assert [each.kind for each in after.claims].count(ClaimKind.FITS) == after.fitting == 2
    assert after.exact == 4
    assert result.why_not_certified == "another recovered input activates nearly the same neurons"
