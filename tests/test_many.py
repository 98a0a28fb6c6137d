"""Many layers at once: each is recovered as if it had been inverted alone."""

from collections.abc import Sequence

import pytest
import torch

import spearpp
from conftest import Client, MakeClient, present
from spearpp import simulate
from spearpp.errors import NonFiniteError, ShapeError
from spearpp.inversion import many
from spearpp.inversion.factors.batched import decompose_many
from spearpp.inversion.many import one_round, stack
from spearpp.inversion.result import Inversion
from spearpp.search import Gated
from spearpp.types import LayerTensors


def together(layers: Sequence[LayerTensors]) -> dict[int, Inversion]:
    """What one round settles; on a CPU ``invert_many`` does not ask it."""
    return dict(one_round(stack(layers), Gated(), torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def clients(make_client: MakeClient) -> list[Client]:
    return [make_client(8, 120, 60, seed=seed) for seed in range(6)]


class TestOneRound:
    def test_most_batches_come_back_whole_and_certified(self, clients: list[Client]) -> None:
        found = together([client.seen for client in clients])
        assert len(found) >= 5
        for place, result in found.items():
            assert bool(result.certified.all())
            assert clients[place].score(result).exact

    def test_evidence_is_that_of_a_layer_alone(self, clients: list[Client]) -> None:
        found = together([client.seen for client in clients])
        assert len(found) >= 5
        for place, result in found.items():
            alone = spearpp.invert(*clients[place].seen)
            ours, theirs = result.evidence, alone.evidence
            assert ours is not None
            assert theirs is not None
            for name in ("zeros", "chance", "agreeing", "hidden", "allowed", "error", "share"):
                mine, other = (each.columns[name].double().sort().values for each in (ours, theirs))
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-12)
            assert ours.numbers["residual"] == pytest.approx(theirs.numbers["residual"], rel=1e-6)
            assert result.score == alone.score

    def test_batches_of_different_sizes(self, make_client: MakeClient) -> None:
        sizes = dict(enumerate((5, 8, 5, 9)))
        mixed = [make_client(b, 120, 60, seed=place) for place, b in sizes.items()]
        found = together([client.seen for client in mixed])
        assert len(found) >= 3
        for place, result in found.items():
            assert result.batch_size == sizes[place]
            assert mixed[place].score(result).exact

    def test_neurons_without_a_gradient(self, make_client: MakeClient) -> None:
        layers: list[LayerTensors] = []
        for seed in range(3):
            seen = make_client(5, 120, 60, seed=seed).seen
            dead = torch.arange(120) >= 100 + seed
            layers.append(
                (
                    seen.grad_weight.masked_fill(dead[:, None], 0),
                    present(seen.grad_bias).masked_fill(dead, 0),
                    seen.weight,
                    present(seen.bias).masked_fill(dead, -1e3),
                )
            )
        found = together(layers)
        assert len(found) >= 2
        for place, result in found.items():
            torch.testing.assert_close(
                result.inputs.sort(0).values, spearpp.invert(*layers[place]).inputs.sort(0).values, rtol=1e-4, atol=1e-5
            )

    def test_without_a_bias(self, make_client: MakeClient) -> None:
        layers: list[LayerTensors] = []
        for seed in range(3):
            seen = make_client(6, 120, 60, seed=seed, bias=False).seen
            layers.append((seen.grad_weight, None, seen.weight, None))
        found = together(layers)
        assert found
        for place, result in found.items():
            assert not result.scale_known
            alone = spearpp.invert(*layers[place])
            cosine = (
                torch.nn.functional.normalize(result.inputs, dim=1)
                @ torch.nn.functional.normalize(alone.inputs, dim=1).T
            )
            assert float(cosine.abs().amax(1).min()) > 1 - 1e-6

    def test_noise_is_left_to_a_closer_look(self, clients: list[Client]) -> None:
        layers: list[LayerTensors] = []
        for client in clients[:2]:
            seen = client.seen
            noise = 1e-4 * torch.randn(seen.grad_weight.shape, generator=torch.Generator().manual_seed(0))
            layers.append((seen.grad_weight + noise, seen.grad_bias, seen.weight, seen.bias))
        assert not together(layers)

    def test_what_cannot_be_factored_so_spoils_no_other(self, clients: list[Client]) -> None:
        """A layer without a gradient, one of exactly low rank, one with few live rows, one with few used inputs."""
        seen = clients[0].seen
        assert seen.grad_bias is not None

        def with_gradient(weight: torch.Tensor, bias: torch.Tensor) -> LayerTensors:
            return weight, bias, seen.weight, seen.bias

        grown = torch.outer(torch.arange(120.0), torch.ones(60))
        rows, columns = torch.arange(120) < 20, torch.arange(60) < 20
        layers = [
            seen,
            with_gradient(torch.zeros_like(seen.grad_weight), torch.zeros_like(seen.grad_bias)),
            with_gradient(grown, torch.arange(120.0)),
            with_gradient(seen.grad_weight * rows[:, None], seen.grad_bias * rows),
            with_gradient(seen.grad_weight * columns, seen.grad_bias),
            clients[1].seen,
        ]
        found = together(layers)
        assert not {1, 2} & set(found)
        assert {0, 5} & set(found)
        for place in {0, 5} & set(found):
            assert clients[min(place, 1)].score(found[place]).exact

    def test_factors_are_orthonormal_or_not_vouched_for(self) -> None:
        generator = torch.Generator().manual_seed(0)
        factored = 0
        for m, n in ((43, 30), (38, 50), (60, 100), (150, 40), (200, 300)):
            dense = torch.randn(6, m, 6, generator=generator) @ torch.randn(6, 6, n, generator=generator)
            sparse = (torch.rand(6, m, n, generator=generator) < 0.05).float()
            for gradients in (dense.double(), sparse.double(), dense.round().double()):
                for which, factors in decompose_many(gradients, torch.finfo(torch.float32).eps):
                    factored += len(which)
                    left = factors.left
                    apart = left.mT @ left - torch.eye(left.shape[2], dtype=torch.float64)
                    assert float(apart.abs().max()) < 1e-9
                    assert factors.spectrum.shape[1] == min(m, n)
                    rest = torch.linalg.matrix_norm(gradients[which] - left @ factors.right)
                    tail = torch.linalg.vector_norm(factors.spectrum[:, left.shape[2] :], dim=1)
                    torch.testing.assert_close(rest, tail, rtol=1e-3, atol=1e-6 * float(gradients.norm()))
        assert factored >= 12

    def test_nothing_promising_is_no_error(self, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spearpp.search.gated.refine.PROMISING", 2.0)
        assert together([make_client(5, 120, 60, seed=seed).seen for seed in range(2)]) == {}

    def test_parts_change_nothing(self, clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
        layers = [client.seen for client in clients]
        whole = together(layers)
        monkeypatch.setattr(many, "BYTES", 2 * 48 * many.SPARE * 8 * 8 * 120)
        cut = together(layers)
        assert abs(len(cut) - len(whole)) <= 1  # each part has starts of its own
        assert len(cut) >= 4
        for place, result in cut.items():
            assert clients[place].score(result).exact


class TestMany:
    def test_results_are_in_order_whatever_the_shape(self, make_client: MakeClient) -> None:
        mixed = [make_client(5, 100, 40, seed=1), make_client(4, 90, 50, seed=2), make_client(6, 100, 40, seed=3)]
        told: list[int] = []
        results = spearpp.invert_many([client.seen for client in mixed], progress=told.append)
        assert [result.batch_size for result in results] == [5, 4, 6]
        assert all(client.score(result).exact for client, result in zip(mixed, results, strict=True))
        assert told == [1, 2, 3]

    def test_one_seed_gives_one_result(self, clients: list[Client]) -> None:
        seen = [client.seen for client in clients[:2]]
        first, second = (spearpp.invert_many(seen, generator=torch.Generator().manual_seed(3)) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.inputs, other.inputs)

    def test_nothing_gives_nothing(self) -> None:
        assert spearpp.invert_many([]) == []

    def test_an_error_says_which_layer(self, clients: list[Client]) -> None:
        seen = clients[0].seen
        broken = (torch.full_like(seen.grad_weight, torch.nan), seen.grad_bias, seen.weight, seen.bias)
        with pytest.raises(NonFiniteError, match="layer 1 of 2: grad_weight"):
            spearpp.invert_many([seen, broken])
        with pytest.raises(ShapeError, match="layer 0 of 1"):
            spearpp.invert_many([(seen.grad_weight.T, seen.grad_bias, seen.weight, seen.bias)])


@pytest.mark.gpu
def test_a_gpu_does_them_together(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    model = simulate.mlp(300, [200, 200], 10, generator=generator)
    batches = [simulate.random_batch(12, features=300, generator=generator) for _ in range(20)]
    layers = [simulate.fedsgd(model, batch)[0].to(cuda) for batch in batches]
    alone: list[int] = []

    def counted(*layer: torch.Tensor, search: Gated, generator: torch.Generator) -> Inversion:
        alone.append(1)
        return spearpp.invert(*layer, search=search, generator=generator)

    monkeypatch.setattr(many, "invert", counted)
    results = spearpp.invert_many(layers)
    assert len(alone) <= 4
    for batch, result in zip(batches, results, strict=True):
        assert result.inputs.device.type == "cuda"
        assert spearpp.score(result.inputs.cpu(), batch.inputs).exact
