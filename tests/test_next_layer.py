"""The next layer: what it finds, what it certifies, and when it is not used."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spearpp
from conftest import batch_and_model, graded, present, true_directions, true_points
from spearpp import simulate
from spearpp.errors import DtypeError, NonFiniteError, ShapeError
from spearpp.inversion.evidence.two_layers import certify_two_layers, chance_of_another
from spearpp.inversion.matches import Matches, SolvedInputs, confirm, forward_noise, no_matches, outside, solve_inputs
from spearpp.inversion.next_layer import NextLayer, few_outputs, read_next_layer
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import Problem, pose
from spearpp.inversion.result import Inversion, Progress
from spearpp.inversion.solutions import no_pairs
from spearpp.linalg import sphere
from spearpp.linalg.nullspace import min_masked_residual
from spearpp.metrics import Score
from spearpp.search import Gated, RiemannianAdam
from spearpp.search.gated.accept import sent_back
from spearpp.search.gated.backward import BackwardRounds
from spearpp.search.gated.two_layers import TwoLayerRounds, reflect
from spearpp.simulate import Batch, LayerGradient
from spearpp.types import select_rows


@dataclass(frozen=True)
class Pair:
    """A batch and the first two layers the server sees."""

    batch: Batch
    layers: list[LayerGradient]

    def invert(
        self,
        search: Gated | None = None,
        *,
        batch_size: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        **instead: torch.Tensor | None,
    ) -> Inversion:
        """With both layers, or something else in place of the second."""
        first, second, *_ = self.layers
        following = {"next_grad_weight": second.grad_weight, "next_weight": second.weight} | instead
        return spearpp.invert(
            *first,
            next_grad_weight=following["next_grad_weight"],
            next_weight=following["next_weight"],
            search=search,
            batch_size=batch_size,
            progress=progress,
        )

    def score(self, result: Inversion) -> Score:
        return spearpp.score(result.inputs, self.batch.inputs, normalisation=self.batch.normalisation)

    def wrong(self, result: Inversion) -> int:
        """Certified inputs that are not in the batch."""
        return sum(
            float(spearpp.score(x[None], self.batch.inputs).psnr.max()) < 60 for x in result.inputs[result.certified]
        )

    @cached_property
    def problem(self) -> Problem:
        problem = pose(observe(*self.layers[0]), sparsity=0.1)
        second = self.layers[1]
        next_layer = read_next_layer(second.grad_weight, second.weight, problem.preactivations)
        assert next_layer.why == "used"
        return replace(problem, next_layer=next_layer.next_layer)

    @property
    def next_layer(self) -> NextLayer:
        return present(self.problem.next_layer)

    @property
    def points(self) -> torch.Tensor:
        """The true p, one a row."""
        return sphere.retract(true_points(self.problem, self.batch))

    @property
    def settled(self) -> SolvedInputs:
        """The true p, solved for their own masks."""
        return solve_inputs(self.problem, self.next_layer, self.points, no_matches(self.problem), own=False)


def pair(b: int, m: int, n: int = 150, seed: int = 0, bias: bool = True, hidden: list[int] | None = None) -> Pair:
    batch, model = batch_and_model(b, n, hidden or [m, m], seed=seed, bias=bias)
    return Pair(batch, simulate.fedsgd(model, batch))


class TestStages:
    """Each stage on its own, against the truth."""

    @given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 1000))
    def test_masked_subspaces_meet_where_they_were_planted(self, d: int, e: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        m = d + e + 8
        moving = torch.linalg.qr(torch.randn(m, d, generator=generator, dtype=torch.float64))[0]
        mask = torch.rand(m, generator=generator) < 0.7
        mask[: d + 2] = True
        x = sphere.retract(torch.randn(1, d, generator=generator, dtype=torch.float64))[0]
        other = torch.randn(m, e, generator=generator, dtype=torch.float64)
        other[:, 0] = mask * (moving @ x)
        found, norms = min_masked_residual(mask[None], moving, torch.linalg.qr(other)[0])
        assert float((found[0, :, 0] @ x).abs()) == pytest.approx(1, abs=1e-7)
        assert float(norms[0, 0]) < 1e-7 < float(norms[0, 1])

    def test_pins_decide_what_the_mask_leaves_open(self) -> None:
        moving = torch.eye(4, dtype=torch.float64)[:, :3]
        fixed = torch.eye(4, dtype=torch.float64)[:, :2]
        mask = torch.ones(1, 4, dtype=torch.bool)
        assert float(min_masked_residual(mask, moving, fixed)[1][0, 1]) < 1e-9  # a plane of solutions
        pins = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
        found, norms = min_masked_residual(mask, moving, fixed, (pins, torch.ones(1, 1, dtype=torch.float64)))
        torch.testing.assert_close(found[0, :, 0].abs(), torch.tensor([1.0, 0, 0], dtype=torch.float64))
        assert float(norms[0, 1]) > 0.9

    def test_true_inputs_fit_both_layers_to_the_noise(self) -> None:
        truth = pair(30, 100)
        z = truth.points @ truth.problem.preactivations.T
        noise = forward_noise(truth.problem, truth.next_layer, truth.points)
        assert bool((outside(z, truth.next_layer.activations) < 5 * noise).all())
        assert float(noise.max()) < 1e-5
        back = confirm(truth.problem, truth.next_layer, truth.settled, no_matches(truth.problem))
        assert bool((back.left_over < 5 * back.noise).all())
        q = sphere.retract(torch.linalg.inv(truth.points).T)
        assert float((back.directions * q).sum(1).abs().min()) > 1 - 1e-6

    def test_a_neuron_that_noise_hides_is_decided_backwards(self) -> None:
        batch, model = batch_and_model(40, 150, [100, 100], seed=4)
        first = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        with torch.no_grad():  # input i is at the kink of neuron i: rounding decides whether it is active
            first.bias[:40] = -(first.weight[:40].double() * batch.inputs.double()).sum(1).float()
        truth = Pair(batch, simulate.fedsgd(model, batch))
        on = (first(batch.inputs) > 0).detach()
        guessed = truth.points @ truth.problem.preactivations.T > 0
        back = confirm(truth.problem, truth.next_layer, truth.settled, no_matches(truth.problem))
        assert bool(back.fits.all())
        assert int((back.masks != on).sum()) < int((guessed != on).sum())
        assert truth.invert().missing == 0

    @pytest.mark.parametrize("b", [10, 45])
    def test_most_starts_arrive_at_an_input(self, b: int) -> None:
        truth = pair(b, 120)
        span = torch.linalg.qr(truth.problem.preactivations)[0]
        starts = sphere.uniform(64, b, torch.Generator().manual_seed(0))
        ends, steps = reflect(span.float(), truth.next_layer.activations.float(), starts, 1600)
        true = sphere.retract(truth.points @ truth.problem.preactivations.T) @ span
        assert int(((ends.double() @ true.T).amax(1) > 0.99).sum()) >= 32
        assert steps % 200 == 0

    def test_a_round_finds_inputs_and_the_next_one_others(self) -> None:
        truth = pair(40, 100)
        rounds = TwoLayerRounds(truth.problem, truth.next_layer, 64, torch.float32)
        generator = torch.Generator().manual_seed(0)
        nearest: list[int] = []
        while not rounds.over:
            new = present(rounds.run(rounds.size, generator).matches)
            cosine, which = (new.points @ truth.points.T).max(1) if len(new) else (torch.zeros(0), torch.zeros(0))
            assert bool((cosine > 1 - 1e-9).all())
            nearest += which.long().tolist()
        assert sorted(nearest) == list(range(40))


class TestRecovery:
    @pytest.mark.parametrize(("b", "m"), [(30, 80), (45, 100), (54, 120)])
    def test_batches_that_one_layer_does_not_reach(self, b: int, m: int) -> None:
        truth = pair(b, m)
        result = truth.invert()
        assert result.next_layer == "used"
        assert result.missing == 0
        assert truth.score(result).exact

    def test_each_input_is_exact_without_the_others(self) -> None:
        truth = pair(45, 100)
        result = truth.invert(Gated(starts=64, round_starts=64))
        assert present(result.evidence).scope == "two layers"
        found = len(result.inputs)
        assert 3 <= found < 45
        assert result.missing == 45 - int(result.certified.sum())
        assert int(result.certified.sum()) >= found - 1
        for x in result.inputs[result.certified]:
            assert float(spearpp.score(x[None], truth.batch.inputs).psnr.max()) > 90

    def test_a_layer_without_bias_gives_inputs_up_to_scale(self) -> None:
        truth = pair(30, 100, bias=False)
        result = truth.invert()
        assert not result.scale_known
        assert result.missing == 0
        cosine = sphere.retract(result.inputs.double()) @ sphere.retract(truth.batch.inputs.double()).T
        assert float(cosine.amax(0).min()) > 1 - 1e-9

    def test_one_seed_gives_one_result(self) -> None:
        truth = pair(40, 100)
        assert torch.equal(truth.invert().inputs, truth.invert().inputs)

    def test_raw_pixels(self, cifar_path: Path) -> None:
        generator = torch.Generator().manual_seed(1000)
        batch = simulate.cifar10(40, path=cifar_path, normalise=False, generator=generator)
        model = simulate.mlp(3072, [200] * 3, 10, generator=generator)
        truth = Pair(batch, simulate.fedsgd(model, batch))
        result = truth.invert()
        assert result.missing == 0
        assert truth.score(result).exact

    def test_progress_counts_what_was_seen(self) -> None:
        told: list[Progress] = []
        pair(40, 100).invert(progress=told.append)
        assert [each.found for each in told] == sorted(each.found for each in told)
        assert told[-1].found == 40


class TestCertificates:
    def sighted(self) -> tuple[Pair, Matches, SolvedInputs]:
        """What one round sees of a batch."""
        truth = pair(40, 100)
        rounds = TwoLayerRounds(truth.problem, truth.next_layer, 64, torch.float32)
        seen = present(rounds.run(64, torch.Generator().manual_seed(0)).matches)
        return truth, seen, solve_inputs(truth.problem, truth.next_layer, seen.points, seen, own=True)

    def test_the_truth_is_certified_and_nothing_near_it(self) -> None:
        truth, seen, settled = self.sighted()
        evidence = certify_two_layers(truth.problem, truth.next_layer, seen, settled)
        assert bool(evidence.exact.all())
        turned = sphere.retract(settled.points + 1e-3 * settled.points.roll(1, 0))
        assert not bool(
            certify_two_layers(truth.problem, truth.next_layer, seen, replace(settled, points=turned)).exact.any()
        )
        swapped = select_rows(seen, torch.arange(len(seen)).roll(1))
        assert not bool(certify_two_layers(truth.problem, truth.next_layer, swapped, settled).exact.any())

    @pytest.mark.parametrize("level", [1e-8, 1e-6, 1e-5, 1e-3])
    def test_under_noise_nothing_wrong_is_certified(self, level: float) -> None:
        for seed in range(2):
            truth = pair(25, 100, seed=seed)
            generator = torch.Generator().manual_seed(seed)
            noisy = [
                layer._replace(
                    grad_weight=layer.grad_weight + level * torch.randn(layer.grad_weight.shape, generator=generator)
                )
                for layer in truth.layers
            ]
            result = Pair(truth.batch, noisy).invert(Gated(starts=512), batch_size=25)
            assert truth.wrong(result) == 0
            if level == 1e-8:
                assert result.missing <= 2

    def test_half_precision_on_the_wire(self) -> None:
        truth = pair(30, 100)
        result = Pair(truth.batch, [layer.to(torch.float16) for layer in truth.layers]).invert(Gated(starts=2048))
        assert truth.wrong(result) == 0
        assert float(truth.score(result).psnr.median()) > 50

    def test_one_bad_input_does_not_take_the_others_with_it(self) -> None:
        truth, seen, settled = self.sighted()
        spoilt = settled.points.clone()
        spoilt[0] = sphere.retract(spoilt[0] + 0.3 * spoilt[1])
        evidence = certify_two_layers(truth.problem, truth.next_layer, seen, replace(settled, points=spoilt))
        assert evidence.exact.tolist() == [False] + [True] * (len(seen) - 1)

    def test_certified_inputs_come_first(self) -> None:
        truth = pair(20, 100)
        wire = [layer.to(torch.float16) for layer in truth.layers]
        result = Pair(truth.batch, wire).invert(Gated(starts=2048))
        assert 0 < int(result.certified.sum()) < 20
        assert result.certified.tolist() == sorted(result.certified.tolist(), reverse=True)
        assert torch.equal(present(result.evidence).exact, result.certified)

    def test_without_equations_to_spare_anything_may_be_chance(self) -> None:
        problem = pair(60, 100, n=200).problem
        assert chance_of_another(problem, torch.full((2,), 1e-9), torch.full((2,), 1e-9)).tolist() == [1.0, 1.0]

    def test_beyond_the_counting_limit_nothing_is_certified(self) -> None:
        truth = pair(60, 100, n=200)
        result = truth.invert(Gated(starts=512))
        assert not bool(result.certified.any())


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, kind: str, m: int = 120) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        body = simulate.mlp(150, [m, m], 10, generator=generator)
        self.first, self.second, self.third = (layer for layer in body if isinstance(layer, nn.Linear))
        self.norm = nn.BatchNorm1d(m, affine=False)
        self.side = torch.randn(150, m, generator=generator)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        if self.kind == "dropout":
            y = nn.functional.dropout(y, 0.5, training=True)
        if self.kind == "batch norm":
            y = self.norm(y)
        if self.kind == "skip":
            y = y + x @ self.side
        out: torch.Tensor = self.third(torch.relu(self.second(y)))
        return out


class TestNoNextLayer:
    """Next layers that say nothing: the first is then enough, as without them."""

    @pytest.mark.parametrize("kind", ["plain", "dropout", "batch norm", "skip"])
    def test_what_stands_between_the_layers(self, kind: str) -> None:
        torch.manual_seed(0)
        batch = simulate.random_batch(10, features=150, generator=torch.Generator().manual_seed(1))
        truth = Pair(batch, simulate.fedsgd(Between(kind), batch))
        result = truth.invert(Gated(starts=1024))
        assert (result.next_layer == "used") == (kind == "plain")
        assert truth.score(result).exact
        assert present(result.evidence).scope == "one layer"

    @pytest.mark.parametrize("width", [8, 12, 14])
    def test_a_narrow_layer_is_none(self, width: int) -> None:
        truth = pair(14, 100, hidden=[100, width])
        result = truth.invert()
        assert result.next_layer.startswith(f"not used: its {width} outputs cannot distinguish 14 samples")
        assert result.missing == 0

    def test_an_output_layer_is_none(self) -> None:
        truth = pair(14, 100, hidden=[100])
        assert truth.invert().next_layer == "not used: its 10 outputs cannot distinguish 14 samples"

    def test_another_client_is_none(self) -> None:
        truth, other = pair(12, 100), pair(12, 100, seed=1)
        result = Pair(truth.batch, [truth.layers[0], other.layers[1]]).invert()
        assert result.next_layer.startswith("not used: no input matches it")
        assert result.missing == 0
        assert truth.score(result).exact

    def test_weights_of_low_rank_are_none(self) -> None:
        truth = pair(12, 100)
        second = truth.layers[1]
        flat = second._replace(weight=torch.ones_like(second.weight))
        assert "do not distinguish" in Pair(truth.batch, [truth.layers[0], flat]).invert().next_layer

    def test_searches_of_the_paper_do_not_use_it(self) -> None:
        truth = pair(5, 80)
        first, second = truth.layers[:2]
        result = spearpp.invert(
            *first,
            next_grad_weight=second.grad_weight,
            next_weight=second.weight,
            search=RiemannianAdam(starts=2048),
        )
        assert result.next_layer == "not used by this search"
        assert result.missing == 0

    def test_a_single_sample_needs_none(self) -> None:
        result = pair(1, 40).invert()
        assert result.next_layer == "not needed"
        assert result.missing == 0

    def test_without_it_nothing_changes(self) -> None:
        first = pair(8, 100).layers[0]
        assert spearpp.invert(*first).next_layer == "not given"


class TestFaint:
    """Samples that a network is sure of send little; the next layer still determines their inputs."""

    def test_strength_is_not_what_tells_samples_apart(self) -> None:
        importance = torch.logspace(0, -9, 12, dtype=torch.float64)
        truth = Pair(*graded(importance, 100, 150, dtype=torch.float64))
        result = truth.invert()
        assert result.next_layer == "used"
        assert result.missing == 0
        assert truth.score(result).exact


class TestErrors:
    def test_one_without_the_other(self) -> None:
        truth = pair(5, 60)
        with pytest.raises(ShapeError, match="next_weight is missing"):
            truth.invert(next_weight=None)
        with pytest.raises(ShapeError, match="next_grad_weight is missing"):
            truth.invert(next_grad_weight=None)

    def test_a_layer_that_does_not_follow(self) -> None:
        truth = pair(5, 60)
        with pytest.raises(ShapeError, match=r"next_weight has shape \(60, 50\), but this layer has 60 neurons"):
            truth.invert(next_weight=torch.zeros(60, 50), next_grad_weight=torch.zeros(60, 50))
        with pytest.raises(ShapeError, match="next_weight has shape"):
            truth.invert(next_weight=torch.zeros(60))

    def test_another_device_or_dtype(self) -> None:
        truth = pair(5, 60)
        with pytest.raises(DtypeError, match=r"next_grad_weight is torch\.strided on meta"):
            truth.invert(next_grad_weight=truth.layers[1].weight.to("meta"))
        with pytest.raises(DtypeError, match="next_grad_weight has dtype"):
            truth.invert(next_grad_weight=truth.layers[1].weight.long())

    def test_damage_is_named_by_its_tensor(self) -> None:
        truth = pair(5, 60)
        broken = truth.layers[1].grad_weight.clone()
        broken[0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match="next_grad_weight holds 1 NaN"):
            truth.invert(next_grad_weight=broken)


class TestFewOutputs:
    """A next layer of few outputs does not determine inputs, but its weights say what the columns of D look like."""

    def client(self, b: int = 30, m: int = 160, outputs: int = 5, seed: int = 0) -> Pair:
        """Raw pixels' worth of correlation: inputs with a large common part, one hidden layer."""
        generator = torch.Generator().manual_seed(seed)
        batch = simulate.random_batch(b, features=200, generator=generator)
        batch = replace(batch, inputs=batch.inputs.abs() + 0.5, labels=batch.labels % outputs)
        model = simulate.mlp(200, [m], outputs, generator=generator)
        return Pair(batch, simulate.fedsgd(model, batch))

    def test_correlated_inputs_come_back_with_them_and_not_without(self) -> None:
        truth = self.client()
        result = truth.invert()
        assert "its weights leave 4 unknowns" in result.next_layer  # softmax minus one-hot sums to zero
        assert result.missing == 0
        assert truth.score(result).exact
        alone = spearpp.invert(*truth.layers[0], search=Gated(starts=result.stats.starts))
        assert alone.missing > 0

    def test_the_columns_it_finds_are_columns_of_d(self) -> None:
        truth = self.client()
        problem = pose(observe(*truth.layers[0]), sparsity=0.1)
        second = truth.layers[1]
        outputs = present(read_next_layer(second.grad_weight, second.weight, problem.preactivations).outputs)
        rounds = BackwardRounds(problem, outputs, 64, torch.float32, no_pairs(problem))
        new = rounds.run(128, torch.Generator().manual_seed(0)).directions
        q = true_directions(problem, truth.batch)
        assert len(new) >= 10
        assert float((new @ q.T).abs().amax(1).min()) > 1 - 1e-9

    def test_what_one_sample_sends_back_is_told_from_a_difference_of_two(self) -> None:
        truth = self.client()
        problem = pose(observe(*truth.layers[0]), sparsity=0.1)
        second = truth.layers[1]
        outputs = present(read_next_layer(second.grad_weight, second.weight, problem.preactivations).outputs)
        q = torch.linalg.inv(true_points(problem, truth.batch)).T
        assert bool(sent_back(problem, outputs, sphere.retract(q)).all())
        assert not bool(sent_back(problem, outputs, sphere.retract(q - q.roll(1, 0))).any())
        assert sent_back(problem, outputs, q[:0]).shape == (0,)

    def test_one_output_against_another(self) -> None:
        second = self.client().layers[1]
        outputs = present(few_outputs(observe(second.grad_weight, None, second.weight, None), 30))
        sent = outputs.between()
        assert sent.shape == (10, 160)
        torch.testing.assert_close(torch.linalg.vector_norm(sent, dim=1), torch.ones(10, dtype=torch.float64))
        first = (second.weight[0] - second.weight[1]).double()
        assert float(sent[0] @ first / torch.linalg.vector_norm(first)) > 1 - 1e-6

    def test_many_outputs_are_not_few(self) -> None:
        second = pair(14, 100, hidden=[100, 12]).layers[1]
        assert few_outputs(observe(second.grad_weight, None, second.weight, None), 14) is None
        assert few_outputs(observe(torch.zeros(3, 100), None, torch.ones(3, 100), None), 14) is None


@pytest.mark.parametrize("e", [1, 2, 5, 12])
def test_a_gram_matrix_that_rounding_makes_indefinite_still_has_its_kernel(e: int) -> None:
    """With two unknowns about one Gram matrix in ten is indefinite after rounding; a small shift did not mend it."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        moving = torch.linalg.qr(torch.randn(e + 10, 2, generator=generator, dtype=torch.float64))[0]
        mask = torch.rand(e + 10, generator=generator) < 0.7
        mask[:4] = True
        x = sphere.retract(torch.randn(1, 2, generator=generator, dtype=torch.float64))[0]
        other = torch.randn(e + 10, e, generator=generator, dtype=torch.float64)
        other[:, 0] = mask * (moving @ x)
        found, _ = min_masked_residual(mask[None], moving, torch.linalg.qr(other)[0])
        assert float((found[0, :, 0] @ x).abs()) == pytest.approx(1, abs=1e-7)
