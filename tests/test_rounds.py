"""Several rounds of one client: what they give together, what is not claimed, and how they are read and kept."""

import copy
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import spearpp
from clients import distances
from conftest import present, true_directions
from spearpp import AuditResult, ClientUpdate, simulate
from spearpp.auditing import ClaimKind, Verdict
from spearpp.auditing.plan import make_plan
from spearpp.auditing.rounds import choose_rounds, first_layer
from spearpp.auditing.rounds.joined import Joined, join_rounds, joined_tensors, not_joined, unite
from spearpp.auditing.task import Task
from spearpp.cli import main
from spearpp.dp import StatedDP
from spearpp.dp.bound import rounded_up
from spearpp.errors import DataError, OptionError
from spearpp.integrations.common.federation import MAX_AGE, RoundStore
from spearpp.integrations.common.job import Settings
from spearpp.integrations.watch import Watch
from spearpp.inversion.next_layer import FewOutputs, few_outputs, read_next_layer
from spearpp.inversion.observation import observe
from spearpp.inversion.problem import Problem, pose
from spearpp.inversion.solutions import no_pairs
from spearpp.linalg import sphere
from spearpp.model import Layer
from spearpp.search import Gated, Suggested
from spearpp.search.gated.over_rounds import BackwardOverRounds, solve_columns
from spearpp.search.gated.signals import SignalsOfRounds
from spearpp.simulate import Batch
from spearpp.update.rounds import MANIFEST, load_rounds

FEATURES = 100
RATE = 0.5
"""Learning rate of the server: the weights of the rounds must differ for the rounds to tell more than one of them."""


def network(activation: nn.Module, m: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, m), activation, nn.Linear(m, 10))


def samples(count: int, seed: int = 1) -> Batch:
    return simulate.random_batch(count, features=FEATURES, generator=torch.Generator().manual_seed(seed))


def layer_of(model: nn.Module, updates: list[ClientUpdate]) -> Layer:
    """The layer whose rounds are joined."""
    return present(first_layer([make_plan(each, Task(model, memory=None)) for each in updates]))


def some(batch: Batch, rows: Sequence[int]) -> Batch:
    return batch.pick(torch.tensor(list(rows)))


@pytest.mark.parametrize(("activation", "m", "b"), [(nn.ReLU(), 40, 24), (nn.GELU(), 30, 25)])
def test_rounds_give_what_no_single_round_gives(activation: nn.Module, m: int, b: int) -> None:
    model, batch = network(activation, m), samples(b)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 4, rate=RATE)
    result = spearpp.audit(updates, model, batch_size=b, budget=30)
    assert result.verdict is Verdict.LEAKS
    assert len(result.inputs) == b
    assert bool((distances(result.inputs, batch) < 1e-3).all())
    assert present(result.replay).difference < 1e-4
    history = present(result.history)
    assert history.recovered_alone < b
    assert history.samples == b
    assert all(each == (0, 1, 2, 3) for each in history.present)
    assert 0 < min(history.known_from) <= max(history.known_from) <= 3
    assert history.known_after(3) == b
    best = present(result.best)
    assert present(best.labels).sort().values.tolist() == batch.labels.sort().values.tolist()


def test_samples_that_come_and_go_are_found_in_their_rounds() -> None:
    model, batch = network(nn.ReLU(), 40), samples(20)
    windows = [range(4 * index, 4 * index + 12) for index in range(3)]
    updates = simulate.play_rounds(model, simulate.FedSGD(), [some(batch, rows) for rows in windows], rate=RATE)
    result = spearpp.audit(updates, model, budget=20)
    history = present(result.history)
    assert len(result.inputs) >= 12
    assert bool((distances(result.inputs, batch) < 1e-3).all())
    nearest = torch.cdist(result.inputs.double(), batch.inputs.double()).argmin(1).tolist()
    for rounds, sample in zip(history.present, nearest, strict=True):
        assert set(rounds) == {index for index, rows in enumerate(windows) if sample in rows}


def test_other_data_in_each_round_claims_nothing_that_is_no_sample() -> None:
    model, batch = network(nn.ReLU(), 20), samples(48)
    updates = simulate.play_rounds(
        model, simulate.FedSGD(), [some(batch, range(12 * index, 12 * index + 12)) for index in range(4)]
    )
    joined = joined_rounds(model, updates, seconds=4)
    assert joined.audited is None or not len(joined.audited.inputs)


def test_rounds_of_small_batches_are_united() -> None:
    model, batch = network(nn.ReLU(), 60), samples(12)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [some(batch, range(6)), some(batch, range(3, 12))])
    result = spearpp.audit(updates, model)
    assert result.history is not None
    assert "every round alone gave all of its samples" in result.history.outcome
    assert len(result.inputs) == 12
    assert bool((distances(result.inputs, batch) < 1e-3).all())
    assert sorted(result.history.present) == [*[(0,)] * 3, *[(0, 1)] * 3, *[(1,)] * 6]


def test_local_training_and_other_clients_between_the_rounds() -> None:
    model, batch = network(nn.ReLU(), 30), samples(14)
    client = simulate.FedAvg(epochs=1, mini_batch=7, rate=0.01)
    updates = simulate.play_rounds(model, client, [batch] * 5, rate=0.05, others=[samples(14, 5), samples(14, 6)])
    result = spearpp.audit(updates, model, budget=20)
    assert result.verdict is Verdict.LEAKS
    assert len(result.inputs) == 14
    assert bool((distances(result.inputs, batch) < 1e-2).all())


def test_momentum_and_another_learning_rate_in_each_round() -> None:
    model, batch = network(nn.ReLU(), 30), samples(14)
    updates, server = [], copy.deepcopy(model)
    for rate in (0.01, 0.02, 0.005, 0.01, 0.02):
        updates.append(simulate.FedAvg(epochs=1, mini_batch=7, rate=rate, momentum=0.5)(server, batch))
        sent = updates[-1]
        server.load_state_dict({name: each - rate * sent.gradients[name] for name, each in sent.weights.items()})
    joined = joined_rounds(model, updates, seconds=20)
    assert joined.audited is not None
    assert len(joined.audited.inputs) == 14
    assert float(torch.cdist(joined.audited.inputs.double(), batch.inputs.double()).amin(1).max()) < 1e-2


def joined_rounds(model: nn.Module, updates: list[ClientUpdate], seconds: float) -> Joined:
    return join_rounds(layer_of(model, updates), dict(enumerate(updates)), Task(model, budget=seconds))


@pytest.mark.parametrize(("rate", "certified"), [(0.0, 0), (1e-6, 0), (RATE, 6)])
def test_rounds_of_a_server_that_does_not_move_count_once(rate: float, certified: int) -> None:
    """Six samples and twelve neurons are too few for a certificate, however often the same gradient arrives."""
    model, batch = network(nn.ReLU(), 12), samples(6)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 8, rate=rate)
    layer = layer_of(model, updates)
    found = spearpp.invert(
        *joined_tensors(layer, updates), rounds=8, one_step=True, search=Suggested(batch.inputs, batch.labels)
    )
    assert float(torch.cdist(found.inputs, batch.inputs).amin(1).max()) < 1e-2
    assert int(found.certified.sum()) == certified


def test_repeated_rows_are_those_of_equal_rounds() -> None:
    model, batch = network(nn.ReLU(), 12), samples(6)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 2, rate=RATE)
    layer = layer_of(model, updates)
    tensors = joined_tensors(layer, [updates[0], updates[1], updates[0]])
    problem = replace(pose(observe(*tensors)), rounds=3)
    first, second, third = problem.repeated_rows.chunk(3)
    live = problem.factors.live[:12]
    assert not bool(first.any() | second[live].any())
    assert bool(third[live].all())


def mixed_up(case: str) -> tuple[nn.Module, list[ClientUpdate], torch.Tensor]:
    """Rounds that are not what they seem to be, and all inputs that took part in them."""
    model, batch, other = network(nn.ReLU(), 40), samples(20), samples(20, 9)
    batches = [batch] * 4
    if case == "one round of another client":
        batches = [batch, batch, other, batch]
    elif case == "near duplicates in each round":
        batches = [replace(batch, inputs=batch.inputs + 1e-3 * index * other.inputs) for index in range(4)]
    elif case == "a sample twice":
        batches = [some(batch, [*range(16), *range(4)])] * 4
    updates = simulate.play_rounds(model, simulate.FedSGD(), batches, rate=RATE)
    if case == "weights in the wrong order":
        updates = [replace(each, weights=updates[index - 1].weights) for index, each in enumerate(updates)]
    return model, updates, torch.cat([each.inputs for each in batches])


CASES = [
    "one round of another client",
    "near duplicates in each round",
    "a sample twice",
    "weights in the wrong order",
]


@pytest.mark.parametrize("case", CASES)
def test_nothing_wrong_is_claimed(case: str) -> None:
    model, updates, truth = mixed_up(case)
    joined = joined_rounds(model, updates, seconds=20 if case == "a sample twice" else 2)
    if joined.audited is None:
        assert case != "a sample twice"
        return
    stated = torch.tensor([each.error for each in joined.audited.claims if each.recovered])
    distances = torch.cdist(joined.audited.inputs.double(), truth.double()) / torch.linalg.vector_norm(truth, dim=1)
    assert bool((distances.amin(1) <= 3 * stated + 1e-6).all())
    if case == "a sample twice":
        assert len(joined.audited.inputs) >= 12


def test_an_input_has_the_error_of_its_own_round() -> None:
    """The first round was rounded to float16. Its inputs are less exact than the claims of the second round state."""
    model, batch = network(nn.ReLU(), 60), samples(6)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 2, rate=RATE)
    coarse = {name: each.half().float() for name, each in updates[0].gradients.items()}
    updates[0] = replace(updates[0], gradients=coarse)
    layer = layer_of(model, updates)
    alone = [spearpp.audit(each, model, batch_size=6, search=Gated(starts=128)) for each in updates]
    union = unite(layer, [*alone], not_joined("this test does not join the rounds"))
    audited = present(union.audited)
    stated = torch.tensor([each.error for each in audited.claims if each.recovered])
    distances = torch.cdist(audited.inputs.double(), batch.inputs.double()).amin(1)
    assert len(stated) == 6
    assert bool((distances <= 3 * stated * torch.linalg.vector_norm(audited.inputs, dim=1)).all())


@pytest.fixture(name="columns", scope="module")
def problem_and_columns() -> tuple[Problem, FewOutputs, torch.Tensor]:
    """Four rounds of a client with 40 samples, and the true directions."""
    model, batch = network(nn.ReLU(), 60), samples(40)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 4, rate=RATE)
    layer = layer_of(model, updates)
    problem = replace(pose(observe(*joined_tensors(layer, updates)), sparsity=0.1), rounds=4, one_step=True)
    gradients, weights = (torch.cat([get(each) for each in updates], 1) for get in (_second_gradient, _second_weight))
    outputs = present(read_next_layer(gradients, weights, problem.preactivations, rounds=4).outputs)
    return replace(problem, outputs=outputs), outputs, true_directions(problem, batch)


def test_reflections_over_rounds_find_new_columns_and_no_others(
    columns: tuple[Problem, FewOutputs, torch.Tensor],
) -> None:
    """Every direction is that of a sample. A second round finds samples that the first one did not find."""
    problem, outputs, true = columns
    rounds = BackwardOverRounds(problem, outputs, 64, torch.float32, no_pairs(problem))
    generator = torch.Generator().manual_seed(0)
    first = rounds.run(128, generator).directions
    second = rounds.run(128, generator).directions
    assert len(first) >= 20
    found = torch.cat([first, second])
    cosines, which = (found @ true.T).abs().max(1)
    assert float(cosines.min()) > 1 - 1e-6
    assert len(set(which.tolist())) == len(found) > len(first)


def test_reflections_that_find_something_do_not_use_up_the_starts(
    columns: tuple[Problem, FewOutputs, torch.Tensor],
) -> None:
    """Large batches need more rounds of reflections than the number of starts would allow."""
    search = Gated(starts=64, round_starts=16)
    proposed = list(search.propose(columns[0], torch.Generator().manual_seed(0), time.monotonic() + 10))
    assert sum(each.starts for each in proposed) > 64
    assert sum(len(each.directions) for each in proposed) >= 39


def test_columns_are_solved_from_end_points_with_wrong_signs(columns: tuple[Problem, FewOutputs, torch.Tensor]) -> None:
    problem, outputs, true = columns
    noise = torch.randn(true.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    near = sphere.retract(true + 0.2 * sphere.retract(noise))
    values = near @ problem.factors.left.T
    signals = 2 * (values @ outputs.span) @ outputs.span.T  # half of the neurons are active
    exact = true @ problem.factors.left.T
    wrong = ((values - signals).abs() < values.abs()) != (exact.abs() > 1e-6)
    assert int(wrong.sum(1).min()) >= 10
    solved = solve_columns(problem, outputs, near, signals)
    assert int(((solved * true).sum(1).abs() > 1 - 1e-9).sum()) >= 30
    assert solve_columns(problem, outputs, near[:0], signals[:0]).shape == (0, 40)


@pytest.mark.parametrize(("outputs", "dimensions"), [(1, 1), (3, 3), (10, 9)])
def test_signals_over_rounds_are_a_set_that_contains_their_starts(outputs: int, dimensions: int) -> None:
    """Ten outputs stand for a softmax, whose gradients sum to zero; one output for a binary classifier."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, outputs, 80, generator=generator, dtype=torch.float64)
    gradient = gradient - gradient.mean(0) * (outputs == 10)
    few = present(few_outputs(observe(gradient, None, weight, None), 50, 4))
    assert few.span.shape == (80, 4 * dimensions)
    signals = SignalsOfRounds(few, torch.float64)
    starts = signals.starts(8, generator, torch.float64)
    assert torch.allclose(torch.linalg.vector_norm(starts, dim=1), torch.ones(8, dtype=torch.float64))
    assert torch.allclose(signals.project(starts), starts, atol=1e-6)
    assert torch.allclose(signals.project(signals.project(3 * weight[:1])), signals.project(3 * weight[:1]), atol=1e-2)


def _second_gradient(update: ClientUpdate) -> torch.Tensor:
    return update.gradients["2.weight"]


def _second_weight(update: ClientUpdate) -> torch.Tensor:
    return update.weights["2.weight"]


def test_an_output_layer_over_rounds() -> None:
    """Eight samples are too many for one round of twelve outputs. Three rounds give them, only approximately."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(FEATURES, 12)), samples(8)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 3, rate=RATE)
    assert spearpp.audit(updates[0], model).verdict is Verdict.NOT_APPLICABLE
    result = spearpp.audit(updates, model, batch_size=8, budget=10)
    assert result.verdict is not Verdict.NOT_APPLICABLE
    assert all(claim.kind is not ClaimKind.APPROXIMATE for claim in result.layers[0].claims)
    found = present(result.layers[0].inversion).inputs
    assert float(torch.cdist(found.double(), batch.inputs.double()).amin(1).max()) < 1e-2


def test_layers_behind_a_frozen_backbone_count_as_first_layers() -> None:
    torch.manual_seed(0)
    backbone, head = nn.Linear(12, FEATURES), network(nn.GELU(), 30)
    model = nn.Sequential(backbone.requires_grad_(False), nn.Tanh(), *head)
    batch = simulate.random_batch(24, features=12, generator=torch.Generator().manual_seed(1))
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 3, rate=RATE)
    result = spearpp.audit(updates, model, budget=15)
    features = torch.tanh(backbone(batch.inputs)).detach()
    assert len(result.inputs) == 24
    assert float(torch.cdist(result.inputs.double(), features.double()).amin(1).max()) < 1e-3


def test_the_most_different_rounds_are_chosen_if_memory_is_short() -> None:
    model, batch = network(nn.GELU(), 20), samples(10)
    updates = simulate.play_rounds(model, simulate.FedSGD(), [batch] * 6, rate=RATE)
    layer = layer_of(model, updates)
    assert choose_rounds(layer, updates, None) == list(range(6))
    three = choose_rounds(layer, updates, 3 * 52 * 20 * FEATURES)
    assert len(three) == 3
    assert {0, 5} <= set(three)
    result = spearpp.audit(updates, model, memory=3 * 52 * 20 * FEATURES, budget=3)
    assert any("3 of 6 rounds were joined: 1, " in each for each in result.caveats)
    assert choose_rounds(layer, [updates[0], updates[1], updates[0], updates[2]], None) == [0, 1, 3]


def test_equal_rounds_are_not_joined() -> None:
    model, batch = network(nn.ReLU(), 20), samples(12)
    result = spearpp.audit(simulate.play_rounds(model, simulate.FedSGD(), [batch] * 3, rate=0.0), model, budget=2)
    assert result.history is not None
    assert "only one round sent a gradient of its own" in result.history.outcome
    assert result.history.samples is None
    assert any("The rounds were not joined" in each for each in result.caveats)


def test_what_cannot_be_rounds_of_one_client_is_refused() -> None:
    model, batch = network(nn.ReLU(), 20), samples(5)
    update = simulate.FedSGD()(model, batch)
    with pytest.raises(OptionError, match="at least one round"):
        spearpp.audit([], model)
    other = simulate.FedSGD()(network(nn.ReLU(), 21), batch)
    with pytest.raises(DataError, match="round 2 has other parameters"):
        spearpp.audit([update, other])
    with pytest.raises(DataError, match="sum of 2 clients"):
        spearpp.audit([update, ClientUpdate.sum([update, update])], model)
    with pytest.raises(OptionError, match="cannot be divided"):
        spearpp.invert(*update.layer("0.weight", "0.bias"), rounds=3)


@pytest.fixture
def client(tmp_path: Path) -> tuple[Path, nn.Sequential, Batch, list[ClientUpdate]]:
    model, batch = network(nn.GELU(), 30), samples(25)
    folder = tmp_path / "client"
    folder.mkdir()
    return folder, model, batch, simulate.play_rounds(model, simulate.FedSGD(), [batch] * 3, rate=RATE)


class TestFolders:
    def test_order_is_that_of_numbers(self, client: tuple[Path, nn.Sequential, Batch, list[ClientUpdate]]) -> None:
        folder, _, _, updates = client
        for number, each in zip((9, 10, 11), updates, strict=True):
            each.save(folder / f"round{number}.safetensors")
        loaded = load_rounds(folder)
        for one, other in zip(loaded, updates, strict=True):
            assert torch.equal(one.weights["0.weight"], other.weights["0.weight"])

    def test_pairs_and_manifest(self, client: tuple[Path, nn.Sequential, Batch, list[ClientUpdate]]) -> None:
        folder, model, batch, _ = client
        trained = simulate.FedAvg(epochs=1, mini_batch=25, rate=0.1)(model, batch)
        after = {name: each - 0.1 * trained.gradients[name] for name, each in trained.weights.items()}
        for name in ("a", "b"):
            torch.save(trained.weights, folder / f"{name}-before.pt")
            torch.save(after, folder / f"{name}-after.pt")
        pairs = load_rounds(folder, lr=0.1, steps=1)
        assert len(pairs) == 2
        assert torch.allclose(pairs[0].gradients["0.weight"], trained.gradients["0.weight"], atol=1e-5)
        listed = [{"before": "b-before.pt", "after": "b-after.pt", "lr": 0.2, "steps": 1}]
        (folder / MANIFEST).write_text(json.dumps(listed))
        (only,) = load_rounds(folder)
        assert only.lr == 0.2
        (folder / "a-before.pt").unlink()
        (folder / MANIFEST).unlink()
        with pytest.raises(DataError, match="has no partner"):
            load_rounds(folder)

    @pytest.mark.parametrize(
        ("manifest", "message"),
        [
            ("{", "cannot be read"),
            ("{}", "not a list"),
            ('[{"before": "x.pt"}]', "no field 'after'"),
            ('[{"after": "../x.pt"}]', "outside of the folder"),
            ('[{"after": "/etc/passwd"}]', "outside of the folder"),
            ('[{"after": "x.pt", "kind": "magic"}]', "expected gradients"),
            ('[{"after": "x.pt", "run": "me"}]', "unknown field 'run'"),
            ("[]", "contains no rounds"),
        ],
    )
    def test_hostile_manifests(self, manifest: str, message: str, tmp_path: Path) -> None:
        (tmp_path / MANIFEST).write_text(manifest)
        with pytest.raises(DataError, match=message):
            load_rounds(tmp_path)

    def test_command_and_report(
        self, client: tuple[Path, nn.Sequential, Batch, list[ClientUpdate]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, _, _, updates = client
        for number, each in enumerate(updates):
            each.save(folder / f"{number}.safetensors")
        layers = f"nn.Linear({FEATURES}, 30), nn.GELU(), nn.Linear(30, 10)"
        (folder / "net.py").write_text(f"from torch import nn\ndef Net(): return nn.Sequential({layers})\n")
        out = folder.parent / "report"
        command = ["audit", "--rounds", str(folder), "--model", f"{folder / 'net.py'}:Net", "--out", str(out)]
        noise = ["--noise-multiplier", "1", "--delta", "1e-3"]
        assert main([*command, *noise, "--budget", "20s", "--fail-on", "leak"]) == 1
        printed = " ".join(capsys.readouterr().out.split())
        assert "25 from 3 rounds together" in printed
        epsilon = StatedDP(1.0, steps=3, delta=1e-3).epsilon
        assert f"The composed ε is {rounded_up(epsilon)} at δ = 0.001." in printed
        page = (out / "report.html").read_text()
        assert "known so far" in page
        assert "composed ε of these steps" in page
        assert json.loads((out / "report.json").read_text())["dp"]["epsilon"] == epsilon
        stored = AuditResult.load(out)
        assert len(present(stored.history).known_from) == 25
        assert main(["audit"]) == 2
        assert main(["audit", str(folder / "0.safetensors"), "--rounds", str(folder)]) == 2


def test_stored_rounds_are_bounded_and_deleted(tmp_path: Path) -> None:
    update = simulate.FedSGD()(network(nn.ReLU(), 5), samples(3))
    store = RoundStore(tmp_path, 2)
    for _ in range(4):
        store.add("client-1", update)
    store.add("client-2", update)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert [path.parent.name for path in files] == ["client-1", "client-1", "client-2"]
    old = files[0].stat().st_mtime - MAX_AGE - 1
    os.utime(files[0], (old, old))
    files[1].write_bytes(b"damaged")
    assert len(store.earlier("client-1")) == 0
    assert len(store.earlier("client-2")) == 1
    store.clear()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_watch_joins_the_files_of_one_client(
    client: tuple[Path, nn.Sequential, Batch, list[ClientUpdate]], tmp_path: Path
) -> None:
    folder, model, _, updates = client
    for number, each in enumerate(updates):
        each.save(folder / f"{number}.safetensors")
    watch = Watch(folder.parent, Settings(model, 10.0, tmp_path / "out", "none", history=2))
    outcomes = list(watch.run(0.01, once=True))
    assert [each.leaks for each in outcomes] == [False, True, True]
    assert outcomes[-1].recovered == 25
    with pytest.raises(OptionError, match="leave out before"):
        Watch(folder, Settings(model, out=tmp_path / "out", history=2), before=folder / "0.safetensors")
    with pytest.raises(OptionError, match="history needs a folder"):
        Settings(history=3)


@pytest.mark.parametrize("idle", [0, 1])
def test_an_idle_round_does_not_hide_what_another_round_gives(idle: int) -> None:
    """A client that did not train in one round sends a gradient of zero. It used to hide the leak of the other."""
    model, batch = network(nn.ReLU(), 60), samples(6)
    sent = simulate.FedSGD()(model, batch)
    nothing = replace(sent, gradients={name: torch.zeros_like(each) for name, each in sent.gradients.items()})
    updates = [nothing, sent] if idle == 0 else [sent, nothing]
    result = spearpp.audit(updates, model, batch_size=6)
    assert result.verdict is Verdict.LEAKS
    assert torch.cdist(batch.inputs.double(), result.inputs.double()).amin(1).max() < 1e-3


def test_two_rounds_with_other_samples_are_replayed_only_if_the_last_gives_some() -> None:
    """If no recovered input belongs to the last round, there is nothing to replay. This was an internal error."""
    model = network(nn.GELU(), 40)
    first = simulate.FedSGD()(model, samples(4))
    noise = replace(first, gradients={name: torch.randn_like(each) for name, each in first.gradients.items()})
    result = spearpp.audit([first, noise], model, batch_size=4, budget=20)
    assert present(result.history).rounds[0].verdict == "LEAKS"
    assert result.verdict is Verdict.LEAKS
    assert len(result.inputs) == 4
