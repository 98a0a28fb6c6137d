"""Audits inside NVFlare: real DXOs, shareables, contexts and filter chains; one job in its own simulator."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

pytest.importorskip("nvflare", reason="NVFlare is not installed: pip install 'spearpp[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

import spearpp
from clients import train
from processes import python
from spearpp import AuditResult, simulate
from spearpp.auditing.folder import read_document
from spearpp.errors import OptionError
from spearpp.integrations.common.federation import Pseudonyms
from spearpp.integrations.nvflare import AuditFilter

ROOT = Path(__file__).parents[1]
RATE = 0.1
BATCH = simulate.digits(6, generator=torch.Generator().manual_seed(1))


def net(seed: int = 5) -> nn.Sequential:
    return simulate.mlp(64, [60, 60], 10, generator=torch.Generator().manual_seed(seed))


def trained(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after one step with the whole batch."""
    model = net()
    model.load_state_dict(weights)
    return train(model, BATCH.inputs, BATCH.labels, rate=RATE)


class Site:
    """One side of a job: its contexts, and a chain of filters for tasks and one for results, as runners apply them."""

    def __init__(self, *filters: Any, side: str = "client") -> None:
        self.contexts = FLContextManager(identity_name="site-1" if side == "client" else "server", job_id="job")
        self.ways = (FilterKey.IN, FilterKey.OUT) if side == "client" else (FilterKey.OUT, FilterKey.IN)
        self.side, self.chains = side, []
        for kind in (FilterChainType.TASK_DATA_CHAIN, FilterChainType.TASK_RESULT_CHAIN):
            chain = [AuditFilter()] if kind == FilterChainType.TASK_DATA_CHAIN else list(filters)
            for each in chain:
                each.set_prop(FilterContextKey.CHAIN_TYPE, kind)
            self.chains.append(chain)

    def _apply(self, which: int, shareable: Shareable, context: FLContext) -> Shareable:
        name = ("task_data_filters", "task_result_filters")[which]
        chains = {"train" + FilterKey.DELIMITER + self.ways[which]: self.chains[which]}
        return apply_filters(name, shareable, context, chains, "train", self.ways[which])

    def talking_to(self, client: str) -> FLContext:
        """A context of a server's, as it is when a client asks for a task or sends its result."""
        context = self.contexts.new_context()
        context.set_peer_context(FLContextManager(identity_name=client, job_id="job").new_context())
        return context

    def round(self, kind: str, *, tensors: bool = False, number: int = 0) -> DXO:
        """What is left of a result after the filters of this side."""
        task = DXO(DataKind.WEIGHTS, _plain(net().state_dict(), tensors), {"lr": RATE, "local_steps": 1})
        shareable = task.to_shareable()
        shareable.set_header(AppConstants.CURRENT_ROUND, number)
        context = self.contexts.new_context()
        self._apply(0, shareable, context)
        if self.side == "server":
            context = self.contexts.new_context()  # a server meets the result in another context
        sent = trained(net().state_dict())
        if kind == DataKind.WEIGHT_DIFF:
            sent = {name: each - net().state_dict()[name] for name, each in sent.items()}
        result = DXO(kind, _plain(sent, tensors)).to_shareable()
        if self.side == "server":
            result.set_peer_props({ReservedKey.IDENTITY_NAME: "site-1"})
        return from_shareable(self._apply(1, result, context))


def _plain(state: dict[str, torch.Tensor], tensors: bool) -> dict[str, Any]:
    return {name: each.clone() if tensors else each.numpy().copy() for name, each in state.items()}


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_full_and_diff_in_numpy_and_tensors_are_audited_on_either_side(
    kind: str, tensors: bool, side: str, tmp_path: Path
) -> None:
    site = Site(AuditFilter(out=tmp_path, redact="none", salt="s", model=net()), side=side)
    site.round(kind, tensors=tensors, number=4)
    report = tmp_path / "round-0005" / Pseudonyms("s").of("site-1")
    result, content = AuditResult.load(report), read_document(report)
    assert spearpp.score(result.inputs, BATCH.inputs, normalisation=BATCH.normalisation).exact
    assert content["training"] == {"lr": RATE, "steps": 1, "momentum": None}
    assert content["replay"]["scale"] == pytest.approx(1.0, abs=1e-3)


def test_a_warning_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for kind in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
        plain, warned = Site().round(kind), Site(AuditFilter("warn")).round(kind)
        assert warned.data_kind == kind
        assert all(numpy.array_equal(plain.data[name], warned.data[name]) for name in plain.data)
    assert "LEAKS: 6 of 6" in caplog.text


def test_the_loss_of_the_client_reaches_the_audit(tmp_path: Path) -> None:
    Site(AuditFilter(out=tmp_path, salt="s", model=net(), loss="mse")).round(DataKind.WEIGHTS)
    content = read_document(tmp_path / "round-0001" / Pseudonyms("s").of("site-1"))
    assert "The audit used the given loss, mse, with one-hot targets." in content["caveats"]


def test_what_leaks_is_blocked_as_the_platform_blocks() -> None:
    with pytest.raises(ContentBlockedException, match="refused to send this update: 6 of 6"):
        Site(AuditFilter("block")).round(DataKind.WEIGHTS)
    Site(AuditFilter("block", every=2)).round(DataKind.WEIGHTS)  # round 1 is not due


def test_noise_is_handed_over_to_a_filter_of_the_platform() -> None:
    numpy.random.seed(0)  # noqa: NPY002  # SVTPrivacy draws from it
    plain = Site().round(DataKind.WEIGHT_DIFF)
    noised = Site(AuditFilter("noise", noise=SVTPrivacy(fraction=0.5, noise_var=1.0))).round(DataKind.WEIGHT_DIFF)
    assert not numpy.array_equal(plain.data["0.weight"], noised.data["0.weight"])
    with pytest.raises(OptionError, match="needs noise="):
        AuditFilter("noise")


def test_the_last_filter_sees_exactly_what_leaves() -> None:
    numpy.random.seed(0)  # noqa: NPY002
    Site(SVTPrivacy(fraction=0.5, noise_var=1.0), AuditFilter("block")).round(DataKind.WEIGHT_DIFF)
    with pytest.raises(ContentBlockedException):
        Site(AuditFilter("block"), SVTPrivacy(fraction=0.5, noise_var=1.0)).round(DataKind.WEIGHT_DIFF)


def test_without_the_weights_sent_a_block_stays_closed() -> None:
    alone = AuditFilter("block")
    alone.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_RESULT_CHAIN)
    context = FLContextManager(identity_name="site-1", job_id="job").new_context()
    result = DXO(DataKind.WEIGHTS, _plain(net().state_dict(), False)).to_shareable()
    with pytest.raises(ContentBlockedException, match="Add the filter to the tasks of this side too"):
        alone.process(result, context)
    metrics = DXO(DataKind.METRICS, {"loss": 1.0}).to_shareable()
    assert alone.process(metrics, context) is metrics, "metrics are none of its business"


def test_a_server_keeps_the_weights_of_each_client(tmp_path: Path) -> None:
    """Two clients at work on different weights: each is audited against its own."""
    site = Site(AuditFilter(out=tmp_path, model=net(), salt="s"), side="server")
    sent = {name: net(seed).state_dict() for seed, name in enumerate(("site-1", "site-2"))}
    for name, weights in sent.items():
        site._apply(0, DXO(DataKind.WEIGHTS, _plain(weights, False)).to_shareable(), site.talking_to(name))
    for name, weights in sent.items():
        result = DXO(DataKind.WEIGHTS, _plain(trained(weights), False)).to_shareable()
        result.set_peer_props({ReservedKey.IDENTITY_NAME: name})
        site._apply(1, result, site.talking_to(name))
        content = read_document(tmp_path / "round-unknown" / Pseudonyms("s").of(name))
        assert content["verdict"] == "LEAKS"
        assert content["estimated"]["lr"] == pytest.approx(RATE, rel=1e-3)


def test_a_task_of_something_else_goes_out_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(side="server")
    task = DXO(DataKind.WEIGHTS, {"layers": {"nested": "words"}}).to_shareable()
    assert from_shareable(site._apply(0, task, site.contexts.new_context())).data == {"layers": {"nested": "words"}}
    assert "cannot store the weights" in caplog.text


def test_a_server_need_not_wait(tmp_path: Path) -> None:
    audit = AuditFilter(out=tmp_path, wait=False)
    site = Site(audit, side="server")
    site.round(DataKind.WEIGHTS)
    audit.handle_event(EventType.END_RUN, site.contexts.new_context())
    (report,) = tmp_path.glob("round-0001/client-*")
    assert read_document(report)["verdict"] == "LEAKS"
    with pytest.raises(OptionError, match="requires policy"):
        AuditFilter("block", wait=False)


def test_in_the_simulator_one_site_leaks_and_one_defends_itself(tmp_path: Path) -> None:
    """The example for users: two sites, two rounds, audited on the server."""
    example = ROOT / "examples" / "nvflare"
    out = tmp_path / "audits"
    command = ("job.py", "--out", out, "--workspace", tmp_path / "work", "--keep", "--salt", "s")
    python(*command, cwd=example, OMP_NUM_THREADS="1")
    names = Pseudonyms("s")
    for number in ("round-0001", "round-0002"):
        leaked = AuditResult.load(out / number / names.of("site-1"))
        samples = torch.Generator().manual_seed(sum(b"site-1"))
        truth = simulate.digits(8, generator=samples)
        assert spearpp.score(leaked.inputs, truth.inputs, normalisation=truth.normalisation).exact
        defended = AuditResult.load(out / number / names.of("site-2"))
        assert defended.verdict != "LEAKS"
        assert len(defended.inputs) == 0
    assert sorted(each.name for each in out.iterdir()) == ["round-0001", "round-0002"]
