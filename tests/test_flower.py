"""Audits inside a Flower federation: real strategies, clients and mods; one run in Flower's own simulation."""

import os
import pickle
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

pytest.importorskip("flwr.serverapp.strategy", reason="Flower is not installed: pip install 'spearpp[flower]'")

from benchmarks.grid import InProcess
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    Result,
    Strategy,
)

import forking
import spearpp
from clients import train
from processes import python
from spearpp import AuditResult, simulate
from spearpp.auditing.folder import DOCUMENT, read_document
from spearpp.errors import OptionError
from spearpp.integrations.common.federation import RoundSampler
from spearpp.integrations.common.job import Job, Settings
from spearpp.integrations.common.outcome import Outcome
from spearpp.integrations.common.worker import Auditor
from spearpp.integrations.flower import AuditStrategy, audit_mod
from spearpp.report import timeline
from spearpp.simulate import Batch

ROOT = Path(__file__).parents[1]
RATE = 0.1
KNOWN = {"lr": RATE, "local-steps": 1}
Train = Callable[[Message, int], dict[str, Any]]


def net() -> nn.Sequential:
    return simulate.mlp(64, [60, 60], 10, generator=torch.Generator().manual_seed(5))


def data(node: int) -> Batch:
    return simulate.digits(6, generator=torch.Generator().manual_seed(node))


def arrays_of(message: Message) -> ArrayRecord:
    return message.content.array_records["arrays"]


def trained(message: Message, model: nn.Module, batch: Batch, **options: Any) -> dict[str, Any]:
    """The weights of a message after training on a batch."""
    model.load_state_dict(arrays_of(message).to_torch_state_dict())
    weights = train(model, batch.inputs, batch.labels, rate=RATE, **options)
    return {name: each.numpy() for name, each in weights.items()}


def step(message: Message, node: int) -> dict[str, Any]:
    """What a FedSGD-like client sends: its weights after one step with the whole batch."""
    return trained(message, net(), data(node))


def client(send: Train = step, mods: list[Any] | None = None) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        arrays = send(message, int(context.node_config["partition-id"]))
        record = ArrayRecord({name: Array(each) for name, each in arrays.items()})
        metrics = MetricRecord({"num-examples": 6, "train_loss": 2.3})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    return app


class Loop(InProcess):
    """A grid within this process: every message goes to a real client app, one that raises sends an error."""

    def __init__(self, app: ClientApp, nodes: int = 3) -> None:
        super().__init__(nodes)
        self.app, self.failures = app, 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self.ask(each) for each in sorted(messages, key=lambda each: each.metadata.dst_node_id)]

    def ask(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(1, node, {"partition-id": node}, RecordDict(), {})
        try:
            return self.app(message, context)
        except ZeroDivisionError as error:
            self.failures += 1
            return Message(Error(code=2, reason=repr(error)), reply_to=message)


def federation(
    strategy: Strategy, app: ClientApp, *, nodes: int = 3, rounds: int = 2, config: dict[str, Any] = KNOWN
) -> Result:
    data(1)  # the first import of the data sets draws random numbers of its own
    random.seed(7)
    initial = ArrayRecord({name: Array(each.numpy()) for name, each in net().state_dict().items()})
    return strategy.start(Loop(app, nodes), initial, num_rounds=rounds, train_config=ConfigRecord(config))


def weights(result: Result) -> dict[str, bytes]:
    return {name: each.numpy().tobytes() for name, each in result.arrays.items()}


def fedavg(**options: Any) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, **options)


def folders(out: Path) -> list[Path]:
    return sorted(out.glob("round-*/*"))


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example for users, in Flower's own simulation: plain, audited, and with its differential privacy."""
    pytest.importorskip("ray", reason="Flower's simulation is not installed: pip install 'flwr[simulation]'")
    out = tmp_path_factory.mktemp("flower")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    example = ROOT / "examples" / "flower"
    paths = os.pathsep.join([str(example), *sys.path])
    return out, python("run.py", "--out", out, "--keep", cwd=example, PYTHONPATH=paths, **quiet)


def test_in_flowers_simulation_audits_do_not_change_the_model(simulation: tuple[Path, str]) -> None:
    assert "same model with and without audits: True" in simulation[1]


def test_in_flowers_simulation_every_client_is_caught_with_its_images(simulation: tuple[Path, str]) -> None:
    reports = folders(simulation[0] / "plain")
    assert len(reports) == 6
    truths = [simulate.digits(8, generator=torch.Generator().manual_seed(client)) for client in range(3)]
    caught = []
    for report in reports:
        result = AuditResult.load(report)
        scores = [spearpp.score(result.inputs, each.inputs, normalisation=each.normalisation) for each in truths]
        caught += [(report.parent.name, client) for client, score in enumerate(scores) if score.exact]
    assert sorted(caught) == [(f"round-000{number}", client) for number in (1, 2) for client in range(3)]
    assert len({report.name for report in reports}) == 3


def test_in_flowers_simulation_its_differential_privacy_stops_them(simulation: tuple[Path, str]) -> None:
    reports = folders(simulation[0] / "private")
    assert len(reports) == 6
    for report in reports:
        assert read_document(report)["verdict"] != "LEAKS"
        assert len(AuditResult.load(report).inputs) == 0


@pytest.fixture
def forked_workers(forking_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit workers that are forked from one process, where a test is not about their processes."""
    entry = forking.CLIENT.format(socket=forking_server, arguments=["--audits"])
    monkeypatch.setattr("spearpp.integrations.common.worker.ENTRY", entry)


HALF: dict[str, Any] = {
    "fraction_evaluate": 0.0,
    "fraction_train": 0.5,
    "min_train_nodes": 4,
    "min_available_nodes": 4,
}


def noise_state() -> bytes:
    """Where NumPy's global random numbers are, from which Flower's server draws its noise."""
    return pickle.dumps(numpy.random.get_state())  # noqa: NPY002


def server_noise(**options: Any) -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(
        FedAvg(**options), noise_multiplier=0.5, clipping_norm=1.0, num_sampled_clients=4
    )


def server_adapts(**options: Any) -> Strategy:
    return DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(**options), noise_multiplier=0.05, num_sampled_clients=4
    )


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("inner", [FedAvg, FedAdam, server_noise, server_adapts])
def test_the_model_is_the_same_to_the_last_bit(inner: Callable[..., Strategy], tmp_path: Path) -> None:
    """Flower's own strategies: the mean, one with a state, and two kinds of DP around one."""
    numpy.random.seed(7)  # noqa: NPY002
    plain = federation(inner(**HALF), client(), nodes=5)
    drawn, noise = random.getstate(), noise_state()
    audited = AuditStrategy(inner(**HALF), out=tmp_path)
    numpy.random.seed(7)  # noqa: NPY002
    assert weights(federation(audited, client(), nodes=5)) == weights(plain)
    assert random.getstate() == drawn, "an audit drew from the platform's random numbers"
    assert noise_state() == noise
    assert [each.verdict for each in audited.outcomes] == ["LEAKS", "LEAKS"]
    assert len(folders(tmp_path)) == 2
    for report in folders(tmp_path):
        assert read_document(report)["redacted"] == "omit"
        assert AuditResult.load(report).inputs.numel() == 0, "reports hold no inputs unless asked for"


@pytest.mark.usefixtures("forked_workers")
def test_what_was_found_is_in_metrics_and_reports(tmp_path: Path) -> None:
    strategy = AuditStrategy(fedavg(), out=tmp_path, model=net(), redact="none", wait=True, salt="pepper")
    metrics = federation(strategy, client()).train_metrics_clientapp
    assert metrics[1]["leak_verdict"] == 1
    assert (metrics[1]["recovered"], metrics[1]["batch_estimate"], metrics[2]["audits_done"]) == (6, 6, 1)
    names = {AuditStrategy(fedavg(), salt="pepper")._names.of(node): node for node in (1, 2, 3)}
    for report in folders(tmp_path):
        truth, result = data(names[report.name]), AuditResult.load(report)
        assert spearpp.score(result.inputs, truth.inputs, normalisation=truth.normalisation).exact
        content = read_document(report)
        assert content["training"] == {"lr": RATE, "steps": 1, "momentum": None}
        assert content["replay"]["scale"] == pytest.approx(1.0, abs=1e-3)  # the rate is right
        assert content["round"] == int(report.parent.name[-1])
        assert content["client"] == report.name
    entries, _ = timeline.read(tmp_path)
    assert [(each.verdict, each.recovered) for each in entries] == [("LEAKS", 6)] * len(folders(tmp_path))
    assert all((tmp_path / str(each.report) / "report.html").is_file() for each in entries)
    assert (tmp_path / timeline.PAGE).is_file()


def steps(message: Message, node: int) -> dict[str, Any]:
    """Two steps with the whole batch, with momentum."""
    return trained(message, net(), data(node), steps=2, momentum=0.9)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("config", [{}, {"learning-rate": RATE, "local-epochs": 2, "momentum": 0.9}])
def test_training_is_read_from_the_configuration_or_told_from_the_update(
    config: dict[str, Any], tmp_path: Path
) -> None:
    strategy = AuditStrategy(fedavg(), out=tmp_path, model=net())
    federation(strategy, client(steps), rounds=1, config=config)
    (report,) = folders(tmp_path)
    content = read_document(report)
    assert content["training"] == {
        "lr": config.get("learning-rate"),
        "steps": config.get("local-epochs"),
        "momentum": config.get("momentum"),
    }
    told = content["estimated"]
    assert told["steps"] == 2
    assert (told["lr"], told["momentum"]) == pytest.approx((RATE, 0.9), abs=1e-3)
    fits = [each for each in content["findings"] if " fits 2 steps with the whole batch at lr 0.1" in each["message"]]
    assert [each["level"] for each in fits] == ["note"], "what was given is right"


def test_what_start_returns_has_the_audits_of_each_round() -> None:
    """Audits end after their round, and the last ones after the last round. Their metrics are still returned."""
    strategy = AuditStrategy(fedavg(), sample=2, waiting=2, out=None)
    metrics = federation(strategy, client(), rounds=4).train_metrics_clientapp
    counted = [{name: each[f"audits_{name}"] for name in ("done", "failed", "dropped")} for each in metrics.values()]
    own = [sum(each.name.startswith(f"round-000{number}") for each in strategy.outcomes) for number in metrics]
    assert counted == [{"done": each, "failed": 0, "dropped": 2 - each} for each in own]
    assert 0 < strategy.auditor.dropped == 8 - sum(own)
    for done, each in zip(own, metrics.values(), strict=True):
        assert each.get("recovered") == (6 if done else None)
        assert each["train_loss"] == pytest.approx(2.3), "the strategy's own are as they were"


def few_neurons() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 30), nn.GELU(), nn.Linear(30, 10))


def same_data_every_round(message: Message, node: int) -> dict[str, Any]:
    return trained(message, few_neurons(), simulate.digits(24, generator=torch.Generator().manual_seed(node)))


@pytest.mark.usefixtures("forked_workers")
def test_a_history_of_rounds_gives_what_one_round_does_not(tmp_path: Path) -> None:
    def run(strategy: Strategy) -> Result:
        random.seed(7)
        initial = ArrayRecord({name: Array(each.numpy()) for name, each in few_neurons().state_dict().items()})
        grid = Loop(client(same_data_every_round), 10)
        return strategy.start(grid, initial, num_rounds=8, train_config=ConfigRecord(dict[str, Any](KNOWN)))

    options: dict[str, Any] = {"budget": 8.0, "model": few_neurons(), "redact": "none", "waiting": 100, "seed": 1}
    audited = AuditStrategy(fedavg(), every=2, sample=1, out=tmp_path, history=8, salt="same", **options)
    assert weights(run(audited)) == weights(run(fedavg()))
    assert not any(tmp_path.rglob(".history/*/*"))
    reports = {path.parent.name: AuditResult.load(path) for path in folders(tmp_path)}
    assert list(reports) == [f"round-{number:04d}" for number in (2, 4, 6, 8)]
    batches = [simulate.digits(24, generator=torch.Generator().manual_seed(node)).inputs for node in range(11)]
    first, *_, last = reports.values()
    assert len(first.inputs) == 0
    assert len(last.inputs) == 24
    assert min(float(torch.cdist(last.inputs, each).amin(1).max()) for each in batches) < 1e-2


@pytest.mark.usefixtures("forked_workers")
def test_every_and_sample_choose() -> None:
    some = AuditStrategy(fedavg(), every=2, sample=2, out=None)
    federation(some, client(), rounds=4)
    assert [each.name[:10] for each in some.outcomes] == ["round-0002"] * 2 + ["round-0004"] * 2
    with pytest.raises(OptionError, match="every=0"):
        AuditStrategy(fedavg(), every=0)


def test_the_choice_is_random_and_the_seeds() -> None:
    chosen = {seed: [RoundSampler(seed=seed).among(number, range(10)) for number in range(1, 30)] for seed in (0, 1)}
    assert all(len(each) == 1 for each in chosen[0]), "one a round"
    assert len({each[0] for each in chosen[0]}) > 5
    assert chosen[0] != chosen[1]


@pytest.mark.usefixtures("forked_workers")
def test_deltas_are_audited_and_no_report_names_a_client(tmp_path: Path) -> None:
    class Own(Strategy):
        """A strategy from scratch: adds what its clients send to what it had sent them."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
        ) -> list[Message]:
            self.arrays, content = arrays, RecordDict({"model": arrays, "settings": config})
            return [Message(content, dst_node_id=each, message_type="train") for each in grid.get_node_ids()]

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, None]:
            changes = [reply.content.array_records["change"] for reply in replies]
            summed = {n: sum(each[n].numpy() for each in changes) + a.numpy() for n, a in self.arrays.items()}
            return ArrayRecord({name: Array(each) for name, each in summed.items()}), None

        def configure_evaluate(self, *args: Any) -> list[Message]:
            return []

        def aggregate_evaluate(self, *args: Any) -> None:
            return None

        def summary(self) -> None:
            return None

    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        record = message.content.array_records["model"]
        after = step(Message(RecordDict({"arrays": record}), reply_to=message), context.node_id % 1000)
        change = {name: Array(after[name] - each.numpy()) for name, each in record.items()}
        return Message(RecordDict({"change": ArrayRecord(change)}), reply_to=message)

    grid = Loop(app)
    grid.nodes = [918273645001, 918273645002]
    strategy = AuditStrategy(Own(), sample=None, out=tmp_path, kind="deltas", redact="none", wait=True, loss="unknown")
    initial = ArrayRecord({name: Array(each.numpy()) for name, each in net().state_dict().items()})
    metrics = strategy.start(grid, initial, num_rounds=1).train_metrics_clientapp
    assert dict(metrics[1])["leak_verdict"] == 1, "a strategy without metrics has those of its audits"
    assert [each.verdict for each in strategy.outcomes] == ["LEAKS", "LEAKS"]
    assert ["The loss is unknown" in each.read_text() for each in tmp_path.rglob(DOCUMENT)] == [True, True]
    for file in tmp_path.rglob("*"):
        assert "918273645" not in file.name
        assert file.is_dir() or b"918273645" not in file.read_bytes()


@pytest.mark.parametrize(
    "wrong",
    [{"sample": -1}, {"budget": 0}, {"redact": "some"}, {"waiting": 0}, {"kind": "sums"}, {"loss": "hinge"}],
    ids=str,
)
def test_options_that_cannot_be_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        AuditStrategy(fedavg(), **wrong)
    if not wrong.keys() & {"sample", "waiting"}:
        with pytest.raises(OptionError, match=next(iter(wrong))):
            audit_mod(**wrong)


@pytest.mark.usefixtures("forked_workers")
def test_everything_else_is_the_inner_strategys() -> None:
    class Own(FedAvg):
        def start(self, *args: Any, **kwargs: Any) -> Result:
            self.began = True
            return super().start(*args, **kwargs)

    inner = Own(fraction_evaluate=0.0)
    strategy = AuditStrategy(inner, out=None)
    strategy.min_train_nodes = 3
    assert inner.min_train_nodes == 3
    assert strategy.weighted_by_key == "num-examples"
    federation(strategy, client(), rounds=1)
    assert inner.began
    assert strategy.began
    assert [each.verdict for each in strategy.outcomes] == ["LEAKS"]
    assert "configure_train" not in vars(inner), "its own methods are back"
    name: Any = "FedAvg"
    with pytest.raises(OptionError, match="expected a flwr"):
        AuditStrategy(name)


def test_a_full_queue_drops_audits_and_never_replies(caplog: pytest.LogCaptureFixture) -> None:
    plain = federation(fedavg(), client(), nodes=6, rounds=1)
    strategy = AuditStrategy(fedavg(), sample=None, waiting=1, out=None)
    result = federation(strategy, client(), nodes=6, rounds=1)
    assert weights(result) == weights(plain)
    assert result.train_metrics_clientapp[1]["audits_dropped"] == strategy.auditor.dropped >= 4
    assert len(strategy.outcomes) + strategy.auditor.dropped == 6
    assert "1 audits are waiting" in caplog.text


class Tolerant(FedAvg):
    """Averages the replies that fit the model, as a careful server does."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        shapes = {name: tuple(each.shape) for name, each in net().state_dict().items()}

        def fits(reply: Message) -> bool:
            if reply.has_error():
                return False
            arrays = arrays_of(reply)
            same = {name: tuple(each.shape) for name, each in arrays.items()} == shapes
            return same and all(bool(numpy.isfinite(each.numpy()).all()) for each in arrays.values())

        return super().aggregate_train(server_round, [each for each in replies if fits(each)])


def faulty(message: Message, node: int) -> dict[str, Any]:
    arrays = step(message, node)
    if node == 2:
        raise ZeroDivisionError("crashed in mid-round")
    if node == 3:
        return {"garbage": numpy.frombuffer(b"not a model", dtype=numpy.uint8)}
    if node == 4:
        arrays["0.weight"] = arrays["0.weight"][:, :-1].copy()
    if node == 5:
        arrays["2.bias"] = numpy.full_like(arrays["2.bias"], numpy.nan)
    return arrays


@pytest.mark.usefixtures("forked_workers")
def test_faulty_replies_are_logged_and_the_federation_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = federation(Tolerant(fraction_evaluate=0.0), client(faulty), nodes=5)
    strategy = AuditStrategy(Tolerant(fraction_evaluate=0.0), sample=None, waiting=20, out=tmp_path, salt="s")
    assert weights(federation(strategy, client(faulty), nodes=5)) == weights(plain)
    name = {strategy._names.of(node): node for node in range(1, 6)}
    first = {name[each.name.split("/")[1]]: each for each in strategy.outcomes if each.name.startswith("round-0001")}
    assert sorted(first) == [1, 3, 4, 5]
    assert first[1].verdict == "LEAKS"
    assert "garbage" in first[3].summary or "no gradient" in first[3].summary
    assert "shape" in first[4].summary
    assert "NaN" in first[5].summary
    for node in (3, 4, 5):
        assert first[node].summary in caplog.text
    assert [each.name for each in folders(tmp_path)] == [strategy._names.of(1)] * 2, "no report is half-written"


def job(name: str) -> Job:
    return Job(name, net().state_dict(), train(net(), data(1).inputs, data(1).labels, rate=RATE))


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    assert condition()


def test_a_killed_worker_is_started_again_and_a_full_disk_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auditor = Auditor(Settings(out=tmp_path))
    auditor.submit("round-0001/a", lambda: job("round-0001/a"))
    until(lambda: auditor.worker is not None)
    os.kill(auditor.worker or 0, signal.SIGKILL)  # over the audit
    auditor.submit("round-0001/b", lambda: job("round-0001/b"))
    assert [each.verdict for each in auditor.finish()] == ["LEAKS", "LEAKS"]
    assert "worker died (signal 9" in caplog.text
    os.kill(auditor.worker or 0, signal.SIGKILL)  # between audits
    auditor.submit("round-0002/a", lambda: job("round-0002/a"))
    assert auditor.finish()[-1].verdict == "LEAKS"
    # The kernel refuses the worker every write beyond 2,000 bytes, as a full disk would.
    resource.prlimit(auditor.worker or 0, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    auditor.submit("round-0003/a", lambda: job("round-0003/a"))
    full = auditor.finish()[-1]
    assert full.verdict == "LEAKS"
    assert full.folder is None
    assert "no report written" in str(full.problem)
    assert "no report written" in caplog.text
    auditor.close()
    assert auditor.worker is None
    assert [f"{each.parent.name}/{each.name}" for each in folders(tmp_path)] == [
        "round-0001/a",
        "round-0001/b",
        "round-0002/a",
    ]
    for report in folders(tmp_path):
        AuditResult.load(report)


def test_an_audit_that_kills_every_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spearpp.integrations.common.worker.ENTRY", "import os; os._exit(3)")
    auditor = Auditor(Settings())
    auditor.submit("a", lambda: job("a"))
    assert auditor.finish() == [Outcome.failed("a", "not audited: the worker died 2 times during this audit")]
    auditor.close()


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    auditor = Auditor(Settings(budget=None))
    with monkeypatch.context() as impatient:
        impatient.setattr("spearpp.integrations.common.worker.PATIENCE", 0.1)
        auditor.submit("a", lambda: job("a"))
        until(lambda: auditor.worker is not None)
        os.kill(auditor.worker or 0, signal.SIGSTOP)  # it will never answer
        time.sleep(0.5)  # by now the time for its answer runs; the next worker has all the time it needs
    auditor.submit("b", lambda: job("b"))
    assert [each.verdict for each in auditor.finish()] == ["LEAKS", "LEAKS"], "it was begun anew, and the next was done"
    assert "no answer for 1.1 s" in caplog.text
    assert "worker died (signal 9" in caplog.text
    auditor.close()


def answer(app: ClientApp, **config: Any) -> Message:
    arrays = ArrayRecord({name: Array(each.numpy()) for name, each in net().state_dict().items()})
    settings = ConfigRecord({"lr": RATE, "local-steps": 1, "server-round": 1, **config})
    sent = Message(RecordDict({"arrays": arrays, "config": settings}), dst_node_id=1, message_type="train")
    return Loop(app).ask(sent)


def bytes_of(reply: Message) -> dict[str, bytes]:
    return {name: each.numpy().tobytes() for name, each in arrays_of(reply).items()}


def private(sigma: float = 0.05) -> LocalDpMod:
    return LocalDpMod(clipping_norm=10.0, sensitivity=sigma, epsilon=4.844805262605389, delta=1e-5)


def test_a_client_that_warns_sends_what_it_would_have_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warned = answer(client(mods=[audit_mod("warn", out=tmp_path, model=net())]))
    assert bytes_of(warned) == bytes_of(answer(client()))
    assert "LEAKS: 6 of 6" in caplog.text
    assert read_document(tmp_path / "round-0001" / "own")["training"]["lr"] == RATE


def test_a_client_that_blocks_sends_an_error_that_the_server_can_handle() -> None:
    app = client(mods=[audit_mod("block")])
    refused = answer(app)
    assert refused.has_error()
    assert "refused to send this update: 6 of 6 training inputs" in str(refused.error.reason)
    assert federation(fedavg(), app).train_metrics_clientapp == {}, "no update arrived, and the server went on"
    assert not answer(client(mods=[audit_mod("block", every=2)])).has_error()


def test_the_first_mod_sees_exactly_what_leaves() -> None:
    assert not answer(client(mods=[audit_mod("block"), private()])).has_error()
    assert answer(client(mods=[private(), audit_mod("block")])).has_error(), "inside, it sees what noise would hide"


def test_gradients_and_deltas_are_seen_for_what_they_are() -> None:
    def deltas(message: Message, node: int) -> dict[str, Any]:
        sent = arrays_of(message)
        return {name: each - sent[name].numpy() for name, each in step(message, node).items()}

    def gradients(message: Message, node: int) -> dict[str, Any]:
        return {name: each / -RATE for name, each in deltas(message, node).items()}

    assert answer(client(deltas, [audit_mod("block", kind="deltas")])).has_error()
    assert answer(client(gradients, [audit_mod("block", kind="gradients")])).has_error()


def shifted(message: Message, _node: int) -> dict[str, Any]:
    """An update that holds no gradient."""
    return {name: each.numpy() + 1 for name, each in arrays_of(message).items()}


def test_noise_is_put_on_what_leaks_and_only_there() -> None:
    noised = answer(client(mods=[audit_mod("noise", noise=private())]))
    assert not noised.has_error()
    assert bytes_of(noised) != bytes_of(answer(client()))
    harmless = answer(client(shifted, [audit_mod("noise", noise=private())]))
    assert bytes_of(harmless) == bytes_of(answer(client(shifted)))
    weak = answer(client(mods=[audit_mod("noise", noise=private(1e-9))]))
    assert weak.has_error()
    assert "after noise" in str(weak.error.reason)
    with pytest.raises(OptionError, match="needs noise="):
        audit_mod("noise")


def test_what_cannot_be_audited_is_not_sent_where_leaks_are_stopped() -> None:
    def diverged(message: Message, node: int) -> dict[str, Any]:
        return {name: each * numpy.nan for name, each in step(message, node).items()}

    assert not answer(client(diverged, [audit_mod("warn")])).has_error()
    refused = answer(client(diverged, [audit_mod("block")]))
    assert "NaN or Inf" in str(refused.error.reason)


def test_a_warning_about_what_cannot_be_read_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def odd(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        arrays_of(reply)["0.bias"] = Array(dtype="float32", shape=(60,), stype="of another library", data=b"?")
        return reply

    assert not answer(client(mods=[audit_mod("warn"), odd])).has_error()
    assert "not audited: cannot read the update" in caplog.text
    assert answer(client(mods=[audit_mod("block"), odd])).has_error()


def test_arrays_beside_the_audited_ones_do_not_slip_through() -> None:
    def more(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        reply.content["gradients"] = ArrayRecord({"0.weight": Array(numpy.ones((60, 64), dtype=numpy.float32))})
        return reply

    assert not answer(client(shifted, [audit_mod("block")])).has_error()
    refused = answer(client(shifted, [audit_mod("block"), more]))
    assert "several array records (arrays, gradients)" in str(refused.error.reason)
    assert not answer(client(shifted, [audit_mod("warn"), more])).has_error()


def test_neither_platform_is_needed_or_loaded_without_asking() -> None:
    code = """
import importlib.abc, sys
import spearpp, spearpp.integrations, spearpp.integrations.watch
assert not {"flwr", "nvflare", "ray"} & set(sys.modules), sys.modules.keys() & {"flwr", "nvflare"}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flwr", "nvflare"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
for extra in ("flower", "nvflare"):
    try:
        __import__(f"spearpp.integrations.{extra}")
    except spearpp.SpearError as error:
        assert f"pip install 'spearpp[{extra}]'" in str(error), error
    else:
        raise AssertionError(extra)
"""
    python("-c", code)
