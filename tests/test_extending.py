"""The five additions of docs/architecture.md, each written here without a change to the package."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import spearpp
from spearpp import ClientUpdate, simulate
from spearpp.auditing import judge as judging
from spearpp.auditing.claims import Claim, Kind, Known, claims_of
from spearpp.auditing.signals import Signals
from spearpp.errors import DataError
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Inversion
from spearpp.linalg import sphere
from spearpp.search import Proposals, RiemannianAdam, Search
from spearpp.search.losses import SparsityLoss
from spearpp.simulate import Batch
from spearpp.update.files import READERS, open_tensors
from spearpp.update.lazy import Stored
from spearpp.update.source import Source


def model_and_batch(samples: int, *hidden: int) -> tuple[nn.Sequential, Batch]:
    model = simulate.mlp(30, list(hidden), 10, generator=torch.Generator().manual_seed(2))
    return model, simulate.random_batch(samples, features=30, generator=torch.Generator().manual_seed(1))


def recovers(recovered: Tensor, batch: Batch) -> bool:
    """Whether the rows of ``recovered`` are the samples of the batch in some order, to 1e-3 of their norm."""
    distances = torch.cdist(recovered.double(), batch.inputs.double()) / batch.inputs.double().norm(dim=1)
    return len(recovered) == len(batch.inputs) and bool((distances.amin(0) <= 1e-3).all())


# A loss: search/losses.py.


@dataclass(frozen=True)
class Huber:
    """φ(y) = Σ h(y_k), with h(y) = y²/2w for |y| ≤ w and |y| - w/2 outside."""

    width: float = 1 / 300
    sparse_minima: ClassVar[bool] = False

    def value(self, y: Tensor) -> Tensor:
        size = y.abs()
        return torch.where(size <= self.width, y.square() / (2 * self.width), size - self.width / 2).sum(-1)

    def gradient(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.div(y, self.width, out=out).clamp_(-1, 1)


def test_a_new_loss_drives_riemannian_adam() -> None:
    y = torch.linspace(-0.02, 0.02, 41, dtype=torch.float64)[None].requires_grad_()
    loss: SparsityLoss = Huber()
    torch.testing.assert_close(torch.autograd.grad(loss.value(y).sum(), y)[0], loss.gradient(y.detach()))
    model, batch = model_and_batch(6, 90, 90)
    search = RiemannianAdam(loss=loss, starts=2048)
    result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=search)
    assert result.missing == 0
    assert recovers(result.inputs, batch)


# A search: a new file in search/, and one line in search/__init__.py.


@dataclass(frozen=True)
class Reweighted:
    """Minimise ‖L q‖₁ by least squares, with each row weighted by the inverse of its last residual."""

    starts: int = 512
    sparsity: float | None = None

    def place(self, problem: Problem) -> Problem:
        return problem

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float) -> Iterator[Proposals]:
        del deadline  # a round takes milliseconds, and the search loop checks the deadline after each
        rows, chunk, steps = problem.live_rows, 64, 25
        for _ in range(0, self.starts, chunk):
            points = sphere.uniform(chunk, problem.batch_size, generator, dtype=rows.dtype, device=rows.device)
            for step in range(steps):
                weights = 1 / (points @ rows.T).abs().clamp_min(0.1 * 0.5**step)
                normal = torch.einsum("sk,ki,kj->sij", weights, rows, rows)
                points = torch.linalg.eigh(normal).eigenvectors[..., 0]
            yield Proposals(points, starts=chunk, steps=chunk * steps)


def test_a_new_search_recovers_a_batch_and_serves_an_audit() -> None:
    search: Search = Reweighted()
    model, batch = model_and_batch(5, 90)
    result = spearpp.invert(*simulate.fedsgd(model, batch)[0], search=search)
    assert result.missing == 0
    assert recovers(result.inputs, batch)
    assert 0 < result.stats.starts <= search.starts
    audited = spearpp.audit(simulate.FedSGD()(model, batch), model, search=search, batch_size=5)
    assert audited.verdict is spearpp.Verdict.LEAKS
    assert recovers(audited.inputs, batch)


# A file format: a reader in update/readers.py.


def open_json(source: Source, _largest: int) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of a JSON object of nested lists."""
    try:
        with source.open() as file:
            content = json.load(file)
        return {name: Stored.in_memory(torch.tensor(each)) for name, each in content.items()}, {}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{source.path} is not a JSON object of nested lists: {error}") from error


def test_a_new_reader_feeds_an_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, ".json", open_json)
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


# A kind of client: simulate/clients.py, and one line in simulate/__init__.py.


@dataclass(frozen=True)
class FedProx(simulate.Client):
    """SGD on the whole batch, with μ/2 ‖w - w₀‖² added to the loss (Li et al. 2020)."""

    steps: int
    rate: float
    proximal: float

    def train(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> ClientUpdate:
        del generator  # nothing is random
        local = copy.deepcopy(model)
        sent = [each.detach().clone() for each in local.parameters()]
        optimiser = torch.optim.SGD(local.parameters(), lr=self.rate)
        for _ in range(self.steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(local(batch.inputs), batch.labels).backward()
            for now, before in zip(local.parameters(), sent, strict=True):
                assert now.grad is not None
                now.grad += self.proximal * (now.detach() - before)
            optimiser.step()
        return ClientUpdate.from_weights(model, local, lr=self.rate, steps=self.steps)


def test_a_new_kind_of_client_is_audited() -> None:
    model, batch = model_and_batch(6, 90, 90)
    update = FedProx(steps=3, rate=1e-3, proximal=0.1)(model, batch)
    assert update.steps == 3
    result = spearpp.audit(update, model)
    assert result.verdict is spearpp.Verdict.LEAKS
    assert recovers(result.inputs, batch)
    quantised = (FedProx(steps=1, rate=1e-3, proximal=0.1) | simulate.TopK(0.5))(model, batch)
    assert any(bool((each == 0).any()) for each in quantised.gradients.values())


# A certificate rule: auditing/claims.py.


def far_from_others(inversion: Inversion, patterns: Tensor, signals: Signals | None, known: Known) -> tuple[Claim, ...]:
    """The rule of the package, and one more: activation patterns must differ from each other in 25 % of the neurons."""
    different = (patterns[:, None] ^ patterns[None]).double().mean(-1)
    different.fill_diagonal_(1.0)
    why = "another recovered input activates nearly the same neurons"
    return tuple(
        claim if alone or not claim.recovered else replace(claim, kind=Kind.FITS, error=float("inf"), why=why)
        for claim, alone in zip(claims_of(inversion, patterns, signals, known), different.amin(1) >= 0.25, strict=True)
    )


def test_a_new_rule_decides_what_an_audit_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_and_batch(6, 90, 90)
    close = batch.inputs.clone()
    close[1] = close[0] + 0.5 * close[1]
    update = simulate.FedSGD()(model, replace(batch, inputs=close))
    before = spearpp.audit(update, model, batch_size=6).layers[0]
    assert before.recovered == 6
    monkeypatch.setattr(judging, "claims_of", far_from_others)
    result = spearpp.audit(update, model, batch_size=6)
    after = result.layers[0]
    assert [each.kind for each in after.claims].count(Kind.FITS) == after.fitting == 2
    assert after.recovered == 4
    assert result.why_not_certified == "another recovered input activates nearly the same neurons"
