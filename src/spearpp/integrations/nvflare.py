"""Audits inside an NVFlare federation: one filter for either side and either direction.

Add it twice, on the tasks and on the results of a side: on tasks it remembers the weights, on results it audits.

client: recipe.add_client_input_filter(AuditFilter("block"), tasks=["train"])
        recipe.add_client_output_filter(AuditFilter("block"), tasks=["train"])
server: the same with add_server_output_filter and add_server_input_filter
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spearpp.auditing.folder import Redaction
from spearpp.errors import DataError, MissingExtraError, OptionError, SpearError
from spearpp.integrations.common import (
    Auditor,
    Gate,
    Job,
    Policy,
    Pseudonyms,
    RoundSampler,
    Settings,
    Training,
    round_name,
    tensors_of,
)
from spearpp.types import Tensor
from spearpp.update import Kind

try:
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.event_type import EventType
    from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
    from nvflare.apis.fl_constant import ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.app_constant import AppConstants

    if TYPE_CHECKING:

        class DXOFilter:
            """What is used of NVFlare's own, which has no types."""

            def __init__(self, supported_data_kinds: list[str], data_kinds_to_filter: list[str]) -> None: ...

            def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None: ...

            def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable: ...

            def get_prop(self, key: str) -> object: ...

            def set_prop(self, key: str, value: object) -> None: ...

    else:
        from nvflare.apis.dxo_filter import DXOFilter
except ImportError as missing:
    raise MissingExtraError("nvflare", "nvflare") from missing

__all__ = ["AuditFilter"]
LOGGER = logging.getLogger("spearpp.integrations")
SENT = "spearpp.sent"
"""The property of a context under which the weights that went out are kept."""


@dataclass(frozen=True, eq=False)
class _Sent:
    weights: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    number: int | None


class AuditFilter(DXOFilter):
    """Audits the weights (FULL) or differences (DIFF) that pass it, as NumPy arrays or tensors.

    On a client it sees exactly what leaves if it is the last of the result filters. There, and wherever ``wait`` is
    True, the result waits for its audit. A server that only warns may audit in a worker of its own instead.
    """

    def __init__(
        self,
        policy: Policy = "warn",
        noise: DXOFilter | None = None,
        every: int = 1,
        budget: float = 30.0,
        out: str | PathLike[str] | None = None,
        model: nn.Module | None = None,
        redact: Redaction = "omit",
        wait: bool = True,
        waiting: int = 4,
        seed: int = 0,
        salt: str | None = None,
    ) -> None:
        """Set it up. NVFlare writes these arguments into a job's configuration.

        Args:
            policy: "warn" logs a leak and lets it pass; "block" stops it, and the server is told of a filter's error;
                "noise" hands what leaks over to ``noise`` and audits that again.
            noise: the filter to hand over to, e.g. ``SVTPrivacy(...)``.
            every: audit rounds that this number divides, counted from one.
            budget: seconds for one audit.
            out: folder for reports, one for each round and client; None for none.
            model: the network, for labels and replays; without it every 2-D weight is tried.
            redact: "omit", "blur" or "none" of what was recovered, in reports.
            wait: False audits in a worker behind a queue of ``waiting``; only with "warn".
            waiting: audits that may wait for the worker; more are dropped.
            seed: of the audits.
            salt: for the names of clients in folders; None draws one.
        """
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        if not wait and policy != "warn":
            raise OptionError(f'wait=False with policy={policy!r}: only "warn" need not wait for its audits')
        settings = Settings(model, budget, out, redact, seed, {"platform": "NVFlare"})
        self.policy, self.noise, self.every, self.budget, self.out = policy, noise, every, budget, out
        self.model, self.redact, self.wait, self.waiting, self.seed, self.salt = (
            model,
            redact,
            wait,
            waiting,
            seed,
            salt,
        )
        self._gate = Gate(policy, settings, has_noise=noise is not None)
        self._auditor = Auditor(settings, waiting=waiting)
        self._choice = RoundSampler(None, every)
        self._names = Pseudonyms() if salt is None else Pseudonyms(salt)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """At the end of a run, wait for the audits that are under way."""
        if event_type == EventType.END_RUN:
            self._auditor.close()

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Remember weights that go to a client, audit what one sends.

        Raises:
            ContentBlockedException: for what must not pass.
        """
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            if dxo.data_kind == DataKind.WEIGHTS:
                _keep(dxo, shareable, fl_ctx)
            return None
        client = _client(shareable, fl_ctx)
        sent: _Sent | None = fl_ctx.get_prop(f"{SENT}.{client}") or fl_ctx.get_prop(SENT)
        number = _round(dxo, shareable, fl_ctx)
        number = sent.number if number is None and sent is not None else number
        if number is not None and not self._choice.due(number):
            return None
        name = f"{round_name(number)}/{self._names.of(client)}"

        def job(what: DXO) -> Job:
            return _job(name, sent, what, number)

        if not self.wait:
            held = DXO(dxo.data_kind, dict(dxo.data), dict(dxo.meta))
            self._auditor.submit(name, lambda: job(held))
            return None
        leaves, why = self._gate.settle(name, dxo, job, None if self.noise is None else self._noised(shareable, fl_ctx))
        if leaves is None:
            raise ContentBlockedException(why)
        return None if leaves is dxo else leaves

    def _noised(self, shareable: Shareable, fl_ctx: FLContext) -> Callable[[DXO], DXO]:
        def noised(dxo: DXO) -> DXO:
            assert self.noise is not None  # noqa: S101
            return self.noise.process_dxo(dxo, shareable, fl_ctx) or dxo

        return noised


def _keep(dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
    """Remember the weights that go out: of each client where that is known, one copy for all that get the same.

    What cannot be remembered holds no task up: its results are then not audited, or do not pass.
    """
    try:
        weights: Mapping[str, Tensor] = tensors_of(dxo.data)
    except SpearError as error:
        LOGGER.warning("the weights sent cannot be remembered: %s", error)
        return
    last: _Sent | None = fl_ctx.get_prop(SENT)
    if last is not None and _same(last.weights, weights):
        weights = last.weights
    kept = _Sent(weights, dict(dxo.meta or {}), _round(dxo, shareable, fl_ctx))
    peer = fl_ctx.get_peer_context()
    # Sticky: a server meets the result in another context than the one it sent the task in.
    for name in (SENT, *([] if peer is None else [f"{SENT}.{peer.get_identity_name()}"])):
        fl_ctx.set_prop(name, kept, private=True, sticky=True)


def _same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    if some.keys() != others.keys():
        return False
    return all(each.dtype == others[name].dtype and torch.equal(each, others[name]) for name, each in some.items())


def _job(name: str, sent: _Sent | None, dxo: DXO, number: int | None) -> Job:
    if sent is None:
        raise DataError("the weights sent were not seen: add the filter to the tasks of this side too")
    training = Training.of(sent.meta, dxo.meta or {})
    about = {"round": number, "training": asdict(training)}
    kind: Kind = "deltas" if dxo.data_kind == DataKind.WEIGHT_DIFF else "weights"
    return Job(name, sent.weights, tensors_of(dxo.data), kind, training, about)


def _round(dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> int | None:
    """The round, counted from one as reports do; NVFlare counts from zero."""
    found = [
        shareable.get_header(AppConstants.CURRENT_ROUND),
        (dxo.meta or {}).get(AppConstants.CURRENT_ROUND),
        fl_ctx.get_prop(AppConstants.CURRENT_ROUND),
    ]
    return next((each + 1 for each in found if isinstance(each, int)), None)


def _client(shareable: Shareable, fl_ctx: FLContext) -> str:
    """Whose result it is: the sender's on a server, our own on a client."""
    return str(shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, None) or fl_ctx.get_identity_name())
