"""The equations of the network: any activation, any part that acts on each sample, and nothing wrong certified."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import spearpp
from clients import distances, gradient_of, layers_of
from conftest import present
from spearpp import search, simulate
from spearpp.auditing import ClaimKind, Verdict
from spearpp.errors import OptionError
from spearpp.inversion.evidence import joint
from spearpp.inversion.evidence.spread import MIN_SKETCH_VECTORS, moved_from_outside
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import pose
from spearpp.inversion.result import Inversion
from spearpp.inversion.solutions import Solutions
from spearpp.inversion.spans import Span
from spearpp.linalg import sphere
from spearpp.model.following import Following
from spearpp.model.rest import Rest
from spearpp.search.equations.finish import repeated
from spearpp.simulate import Batch
from spearpp.types import select_rows
from spearpp.update import ClientUpdate

FEATURES, WIDTH = 40, 60
FEW = search.Equations(starts=40)
Net = Callable[[], nn.Module]


def batch_of(b: int, seed: int = 1) -> Batch:
    return simulate.random_batch(b, features=FEATURES, generator=torch.Generator().manual_seed(seed))


def network(activation: nn.Module, hidden: int = 2, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs in [FEATURES, *[WIDTH] * (hidden - 1)]:
        layers += [nn.Linear(inputs, WIDTH), activation]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def stated(result: Inversion) -> torch.Tensor:
    return present(result.evidence).error


def errors(result: Inversion | None, batch: Batch) -> torch.Tensor:
    return distances(present(result).inputs, batch)


@pytest.mark.parametrize(
    "activation",
    [nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softplus(), nn.LeakyReLU(), nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.Mish()],
    ids=lambda module: type(module).__name__,
)
def test_any_activation(activation: nn.Module) -> None:
    model, batch = network(activation), batch_of(15)
    first, *later = simulate.fedsgd(model, batch)
    result = spearpp.invert(*first, following=Following.of_layers(activation, later))
    assert int(result.certified.sum()) == 15
    assert bool((errors(result, batch) <= stated(result)).all())
    assert bool((stated(result) < 1e-3).all())


@pytest.mark.parametrize(("hidden", "b"), [(1, 20), (3, 36)])
def test_one_hidden_layer_and_more_than_half_the_neurons(hidden: int, b: int) -> None:
    model, batch = network(nn.GELU(), hidden), batch_of(b)
    first, *later = simulate.fedsgd(model, batch)
    result = spearpp.invert(*first, following=Following.of_layers("gelu", later))
    assert int(result.certified.sum()) == b
    assert bool((errors(result, batch) <= stated(result)).all())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.first(x))
        return self.last(hidden + torch.tanh(self.inner(self.norm(hidden))))


class Gated(nn.Module):
    """A SwiGLU unit behind the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 10)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.first(x))
        return self.last(self.down(functional.silu(self.gate(hidden)) * self.up(hidden)))


def normalised() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    present(norm.running_var).fill_(0.5)
    hidden = (nn.Linear(FEATURES, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.SELU())
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10)).eval()


@pytest.mark.parametrize("build", [Residual, Gated, normalised])
def test_any_part_that_acts_on_each_sample(build: Net) -> None:
    torch.manual_seed(3)
    model, batch = build(), batch_of(12)
    loss = functional.cross_entropy(model(batch.inputs), batch.labels)
    update = gradient_of(loss, model)
    result = spearpp.audit(update, model, batch_size=12)
    assert result.verdict is Verdict.LEAKS
    assert result.layers[0].exact == 12
    assert present(result.replay).difference < 1e-5
    assert bool((errors(result.layers[0].inversion, batch) < 1e-3).all())


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_other_losses(loss: str) -> None:
    model, batch = network(nn.GELU()), batch_of(12)
    targets = functional.one_hot(batch.labels, 10).float()
    outputs = model(batch.inputs)
    value = functional.mse_loss(outputs, targets)
    if loss == "bce":
        value = functional.binary_cross_entropy_with_logits(outputs, targets)
    first, *later = layers_of(value, model)
    result = spearpp.invert(*first, following=Following.of_layers("gelu", later, loss))
    assert int(result.certified.sum()) == 12
    assert bool((errors(result, batch) <= stated(result)).all())


def update_with(loss: str, model: nn.Sequential, batch: Batch) -> ClientUpdate:
    """Return the gradients of one of the losses that an audit knows, or of a loss that it does not know."""
    outputs = model(batch.inputs)
    targets = functional.one_hot(batch.labels, 10).float()
    value = {
        "mse": functional.mse_loss(outputs, targets),
        "bce": functional.binary_cross_entropy_with_logits(outputs, targets),
        "unknown": (outputs - targets).abs().pow(1.5).mean(),
    }[loss]
    return gradient_of(value, model)


class TestAuditsWithALoss:
    """The audit uses the loss that it is given, and certifies nothing with another one."""

    @pytest.mark.parametrize("loss", ["mse", "bce", "unknown"])
    def test_the_right_loss(self, loss: str) -> None:
        model, batch = network(nn.GELU(), hidden=3), batch_of(10)
        result = spearpp.audit(update_with(loss, model, batch), model, batch_size=10, loss=loss)
        first = result.layers[0]
        assert first.exact == 10
        assert bool((errors(first.inversion, batch) <= 1e-3).all())
        assert all(each.kind is ClaimKind.ONE_OR_MEAN for each in first.claims)  # such a loss does not count samples
        assert any("loss" in each for each in result.caveats)
        numbers = result.to_dict()["layers"][0]["inversion"]["batch_evidence"]
        assert numbers["forward"] == 2 * 51
        assert numbers["backward"] == (0 if loss == "unknown" else 3 * 50)

    def test_the_replay_uses_the_loss(self) -> None:
        model, batch = network(nn.ReLU()), batch_of(8)
        update = update_with("mse", model, batch)
        result = spearpp.audit(update, model, batch_size=8, loss="mse")
        assert present(result.replay).difference < 1e-5
        nearest = torch.cdist(result.inputs, batch.inputs).argmin(1)
        assert torch.equal(present(result.layers[0].labels), batch.labels[nearest])

    @pytest.mark.parametrize(("real", "given"), [("mse", "cross-entropy"), ("bce", "mse"), ("unknown", "bce")])
    def test_another_loss(self, real: str, given: str) -> None:
        model = network(nn.GELU(), hidden=1)
        result = spearpp.audit(update_with(real, model, batch_of(8)), model, loss=given, search=FEW, budget=3)
        assert result.verdict is Verdict.NOT_FOUND
        assert any("pass this loss" in each for each in result.caveats)

    def test_the_output_layer_needs_a_loss(self) -> None:
        model = nn.Sequential(nn.Linear(FEATURES, 30))
        update = simulate.FedSGD()(model, simulate.random_batch(5, features=FEATURES, classes=30))
        result = spearpp.audit(update, model, loss="unknown")
        assert result.verdict is Verdict.NOT_APPLICABLE
        assert "need the loss" in result.layers[0].reason

    @pytest.mark.parametrize("loss", [functional.mse_loss, functional.l1_loss])
    def test_one_output_needs_no_loss(self, loss: Callable[..., torch.Tensor]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        batch = batch_of(8)
        value = loss(model(batch.inputs), torch.randn(8, 1))
        update = gradient_of(value, model)
        result = spearpp.audit(update, model)
        assert result.layers[0].exact == 8
        assert bool((errors(result.layers[0].inversion, batch) <= 1e-3).all())

    def test_the_name_is_checked(self) -> None:
        model = network(nn.GELU())
        with pytest.raises(OptionError, match="expected cross-entropy, mse, bce, unknown"):
            spearpp.audit(simulate.FedSGD()(model, batch_of(5)), model, loss="hinge")


def test_an_unknown_loss_leaves_the_forward_equations() -> None:
    model, batch = network(nn.GELU(), 3), batch_of(15)
    first, *later = simulate.fedsgd(model, batch)
    result = spearpp.invert(*first, following=Following.of_layers("gelu", later, loss=None))
    assert int(result.certified.sum()) == 15
    assert bool((errors(result, batch) <= stated(result)).all())


@pytest.mark.parametrize(("noise", "seed"), [(3e-6, 2), (1e-5, 1)])
def test_the_stated_error_covers_the_bias_of_similar_samples_towards_their_mean(noise: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(FEATURES, 400), nn.GELU(), nn.Linear(400, 400), nn.GELU(), nn.Linear(400, 10)),
    )
    generator, batch = torch.Generator().manual_seed(seed), batch_of(10, seed)
    for row in range(0, 10, 2):
        change = torch.randn(FEATURES, generator=generator) * batch.inputs[row].norm() / FEATURES**0.5
        batch.inputs[row + 1] = batch.inputs[row] + 0.1 * change
    noisy = []
    for grad_weight, grad_bias, weight, bias in simulate.fedsgd(model, batch):
        assert grad_bias is not None
        drawn = [each.abs().max() * torch.randn(each.shape, generator=generator) for each in (grad_weight, grad_bias)]
        noisy.append((grad_weight + noise * drawn[0], grad_bias + noise * drawn[1], weight, bias))
    result = spearpp.invert(*noisy[0], following=Following.of_layers("gelu", noisy[1:], loss=None))
    assert int(result.certified.sum()) >= 6
    assert bool((errors(result, batch) <= stated(result)).all())


def test_certified_samples_determine_samples_with_few_active_neurons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some samples activate at most as many neurons as there are unknowns, so their own equations leave them open."""
    model, batch = network(nn.ReLU(), seed=1), batch_of(20, seed=2)
    with torch.no_grad():
        model[0].get_parameter("bias").sub_(0.2)
    first, *later = simulate.fedsgd(model, batch)
    results = []
    for passes in (0, joint.MAX_PASSES):
        monkeypatch.setattr(joint, "MAX_PASSES", passes)
        results.append(spearpp.invert(*first, following=Following.of_layers("relu", later)))
    alone, together = results
    assert int(alone.certified.sum()) < int(together.certified.sum()) == 20
    certified = errors(together, batch)[together.certified]
    assert bool((certified <= stated(together)[together.certified]).all())


def test_found_samples_give_equations_of_the_missing_ones() -> None:
    """The vectors of missing samples are orthogonal to what ``without`` returns, and those of found samples are not."""
    generator = torch.Generator().manual_seed(0)
    signals, inputs = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    inputs[:, -1] = 1.0
    left, values, right = torch.linalg.svd(signals.T @ inputs)
    left, values, right = left[:, :5], values[:5], right[:5].T
    of_signals = Span(1, True, left, values, 0.0, 0.0, partner=right)
    of_inputs = Span(1, False, right, values, 0.0, 0.0, partner=left, appended_one=True)
    for span, vectors, others in ((of_signals, signals, inputs[:, :-1]), (of_inputs, inputs, signals)):
        parts = vectors @ span.without(others[:2])
        assert torch.allclose(parts[2:], torch.zeros(3, 2, dtype=torch.float64), atol=1e-10)
        assert (parts[:2].abs().amax(1) > 1e-2).all()


def test_two_solutions_for_one_sample_are_recognised_in_spite_of_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.logspace(0, -0.5, 8, dtype=torch.float64)
    directions = sphere.retract(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    points = torch.linalg.inv((directions / values).T)  # orthogonal to the directions of all others
    noise = sphere.retract(torch.randn(2, 8, 8, generator=generator, dtype=torch.float64))
    moved = points + 0.05 * torch.linalg.vector_norm(points, dim=1, keepdim=True) * noise[0]
    turned = sphere.retract(directions + 0.01 * noise[1])
    labels = torch.zeros(8, dtype=torch.long)
    known, again = Solutions(points, labels, directions), Solutions(moved, labels, turned)
    first, last = torch.arange(5), torch.arange(4, 8)
    found = repeated(select_rows(known, first), select_rows(again, last), values)
    assert found.tolist() == [True, False, False, False]
    twice = torch.tensor([6, 6, 7])
    assert repeated(select_rows(known, first), select_rows(known, twice), values).tolist() == [False, True, False]


@pytest.mark.parametrize("features", [30, 2000])
def test_random_vectors_stand_for_the_noise_outside_of_the_row_space(features: int) -> None:
    model = simulate.mlp(features, [50], 10, generator=torch.Generator().manual_seed(0))
    batch = simulate.random_batch(5, features=features, generator=torch.Generator().manual_seed(1))
    problem = pose(observe(*simulate.fedsgd(model, batch)[0]))
    rows, weight = problem.factors.rows, problem.seen.weight.double()
    outside = weight - (weight @ rows.T) @ rows
    found = moved_from_outside(problem)
    assert found.shape[1] == min(features + 1, MIN_SKETCH_VECTORS)
    trace, expected = found.square().sum(), outside.square().sum()
    torch.testing.assert_close(trace, expected, rtol=1e-9 if features < MIN_SKETCH_VECTORS else 0.2, atol=0.0)


def test_one_seed_gives_one_result() -> None:
    first, *later = simulate.fedsgd(network(nn.SiLU()), batch_of(15))
    runs = [spearpp.invert(*first, following=Following.of_layers("silu", later)) for _ in range(2)]
    assert torch.equal(runs[0].inputs, runs[1].inputs)


def test_the_search_keeps_its_deadline_and_its_starts() -> None:
    first, *later = simulate.fedsgd(network(nn.Tanh()), batch_of(25))
    following = Following.of_layers("gelu", later)
    result = spearpp.invert(*first, following=following, seconds=1e-3)
    assert result.stats.rounds <= 1
    assert "time budget" in result.stats.stopped
    result = spearpp.invert(*first, following=following, search=search.Equations(starts=20))
    assert 20 <= result.stats.starts < 100


class TestWhereTheEquationsDoNotHold:
    """Nothing is certified by equations that do not hold."""

    @staticmethod
    def certified(model: nn.Sequential, b: int, activation: str) -> int:
        first, *later = simulate.fedsgd(model, batch_of(b))
        result = spearpp.invert(*first, following=Following.of_layers(activation, later), search=FEW)
        return int(result.certified.sum())

    @pytest.mark.parametrize(("real", "named"), [(nn.GELU(), "silu"), (nn.Tanh(), "sigmoid"), (nn.ELU(), "gelu")])
    def test_another_activation(self, real: nn.Module, named: str) -> None:
        assert self.certified(network(real), 12, named) == 0

    def test_weights_of_another_round(self) -> None:
        first, *later = simulate.fedsgd(network(nn.GELU()), batch_of(12))
        other = network(nn.GELU(), seed=5)
        weights = [(module.weight, module.bias) for module in other if isinstance(module, nn.Linear)]
        layers = [(*each[:2], *mine) for each, mine in zip([first, *later], weights, strict=True)]
        result = spearpp.invert(*layers[0], following=Following.of_layers("gelu", layers[1:]), search=FEW)
        assert int(result.certified.sum()) == 0

    def test_another_loss(self) -> None:
        model, batch = network(nn.GELU(), hidden=1), batch_of(12)
        targets = functional.one_hot(batch.labels, 10).float()
        first, *later = layers_of(functional.mse_loss(model(batch.inputs), targets), model)
        result = spearpp.invert(*first, following=Following.of_layers("gelu", later), search=FEW)
        assert int(result.certified.sum()) == 0

    def test_random_gradients_of_low_rank(self) -> None:
        model, generator = network(nn.GELU()), torch.Generator().manual_seed(0)
        linear = [module for module in model if isinstance(module, nn.Linear)]
        layers = []
        for each in linear:
            m, n = each.weight.shape
            gradient = torch.randn(m, 9, generator=generator) @ torch.randn(9, n + 1, generator=generator)
            layers.append((gradient[:, :-1].contiguous(), gradient[:, -1].contiguous(), each.weight, each.bias))
        result = spearpp.invert(*layers[0], following=Following.of_layers("gelu", layers[1:]), search=FEW)
        assert int(result.certified.sum()) == 0


def test_random_gradients_of_rank_one_are_no_leak() -> None:
    """The first layer allows one input. Its later layers have nothing to do with it."""
    generator = torch.Generator().manual_seed(0)
    model = network(nn.Tanh(), seed=0)
    sent = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            rows, columns = layer.weight.shape
            sent[f"{name}.bias"] = torch.randn(rows, generator=generator)
            sent[f"{name}.weight"] = torch.outer(sent[f"{name}.bias"], torch.randn(columns, generator=generator))
    result = spearpp.audit(ClientUpdate.from_gradients(model, sent), model, batch_size=1)
    assert result.verdict == Verdict.NOT_FOUND
    honest = spearpp.audit(simulate.FedSGD()(model, batch_of(1)), model, batch_size=1)
    assert honest.verdict == Verdict.LEAKS


def test_two_checkpoints_without_a_model_name_the_activation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30), nn.SiLU(), nn.Linear(30, 30), nn.SiLU(), nn.Linear(30, 10))
    batch = simulate.random_batch(3, features=12, generator=torch.Generator().manual_seed(1))
    result = spearpp.audit(simulate.FedSGD()(model, batch), batch_size=3)
    assert result.layers[0].exact == 3
    assert "silu" in result.layers[0].reason
    assert bool((errors(result.layers[0].inversion, batch) < 1e-3).all())


def test_float16_without_a_model_names_the_activation() -> None:
    """No input is exact, so approximate ones must prove the activation. Noise makes some directions look sparse."""
    model, batch = network(nn.GELU(), seed=0), batch_of(12)
    update = (simulate.FedSGD() | simulate.Cast(torch.float16))(model, batch)
    result = spearpp.audit(update, batch_size=12)
    assert int(result.layers[0].is_recovered.sum()) == 12
    assert "gelu" in result.layers[0].reason
    assert bool((errors(result.layers[0].inversion, batch) < 0.1).all())


def test_an_audit_keeps_the_search_that_recovers_most_although_no_input_is_exact() -> None:
    """With this noise, the first search and the equations of the network recover a part, and a longer search all."""
    batch = simulate.photographs(30, generator=torch.Generator().manual_seed(2))
    model = simulate.mlp(batch.inputs.shape[1], [100, 100], 10, generator=torch.Generator().manual_seed(0))
    update = simulate.DPSGD(clip=1e9, noise=1e-6)(model, batch, torch.Generator().manual_seed(0))
    result = spearpp.audit(update, model, batch_size=30)
    assert int(result.layers[0].is_recovered.sum()) >= 25
    assert not bool(present(result.layers[0].inversion).certified.any())


def test_tokens_of_a_transformer_layer() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(24, 2, 96, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(6 * 24, 10))
    seen: list[torch.Tensor] = []
    encoder.linear1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    x = torch.randn(3, 6, 24)
    loss = functional.cross_entropy(model(x), torch.tensor([1, 2, 3]))
    update = gradient_of(loss, model)
    result = spearpp.audit(update, model)
    found = next(each for each in result.layers if each.layer.name == "0.linear1")
    tokens = seen[0].reshape(-1, 24)
    assert "token" in found.reason
    assert f"the features of {len(tokens)} of {len(tokens)} tokens were recovered" in result.summary
    assert found.exact == len(tokens)
    distances = torch.cdist(found.inputs.double(), tokens.double()) / torch.linalg.vector_norm(tokens, dim=1)
    assert float(distances.amin(1).max()) < 1e-3


def test_the_rest_of_a_network_ends_where_samples_are_mixed() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.second(torch.tanh(self.first(x)))
            return self.last(hidden - hidden.mean(0))

    rest = Rest(Mixed(), "first")
    assert rest.layers == ["second"]
    assert rest.outputs == 0
    assert "does not act on each sample alone" in rest.reason


def test_options_are_checked() -> None:
    first, *later = simulate.fedsgd(network(nn.GELU()), batch_of(5))
    with pytest.raises(OptionError, match="expected one of relu, gelu"):
        Following.of_layers("swish", later)
    with pytest.raises(OptionError, match="expected cross-entropy, mse, bce"):
        Following.of_layers("gelu", later, loss="hinge")
    with pytest.raises(OptionError, match="no later layer"):
        Following.of_layers("gelu", [])
    with pytest.raises(OptionError, match="needs the rest of the network"):
        spearpp.invert(*first, search=search.Equations())
    with pytest.raises(OptionError, match="whole number"):
        search.Equations(starts=0)


class InPlace(nn.Module):
    """Activations that write into their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.elu(self.first(x), inplace=True)
        return self.last(torch.tanh_(self.second(hidden)))


def test_activations_in_place() -> None:
    torch.manual_seed(0)
    model, batch = InPlace(), batch_of(12)
    result = spearpp.audit(simulate.FedSGD()(model, batch), model, batch_size=12)
    assert result.layers[0].exact == 12


def test_the_equations_respect_the_limit_of_memory() -> None:
    model, batch = network(nn.GELU()), batch_of(5)
    result = spearpp.audit(simulate.FedSGD()(model, batch), model, memory=150_000)
    assert result.layers[0].inversion is None
    assert "takes too much memory" in result.layers[0].reason
