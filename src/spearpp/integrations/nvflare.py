"""Audits inside an NVFlare federation: one filter for the server or the clients.

Add the filter twice on the same side. On tasks it stores the weights, and on results it audits the updates.

client: recipe.add_client_input_filter(AuditFilter("block"), tasks=["train"])
        recipe.add_client_output_filter(AuditFilter("block"), tasks=["train"])
server: the same with add_server_output_filter and add_server_input_filter
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spearpp.auditing.folder import Redaction
from spearpp.errors import DataError, OptionError, SpearError, needs
from spearpp.integrations.common.federation import Pseudonyms, RoundSampler, Training, round_name
from spearpp.integrations.common.job import LOGGER, Job, Settings, tensors_of
from spearpp.integrations.common.policy import Gate, Policy
from spearpp.integrations.common.worker import Auditor
from spearpp.types import Tensor
from spearpp.update import Kind

with needs("nvflare", "nvflare"):
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.event_type import EventType
    from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
    from nvflare.apis.fl_constant import ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.app_constant import AppConstants

    if TYPE_CHECKING:

        class DXOFilter:
            """The part of NVFlare's class that is used here. NVFlare has no type annotations."""

            def __init__(self, supported_data_kinds: list[str], data_kinds_to_filter: list[str]) -> None: ...

            def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None: ...

            def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable: ...

            def get_prop(self, key: str) -> object: ...

            def set_prop(self, key: str, value: object) -> None: ...

    else:
        from nvflare.apis.dxo_filter import DXOFilter

__all__ = ["AuditFilter"]
SENT = "spearpp.sent"
"""Name of the context property that stores the sent weights."""


@dataclass(frozen=True, eq=False)
class _Sent:
    """The weights of one task, with its metadata and its round."""

    weights: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    number: int | None


class AuditFilter(DXOFilter):
    """Audit the weights (FULL) or weight differences (DIFF) in results, as NumPy arrays or tensors.

    On a client, add this filter as the last result filter: there it sees exactly what the client sends. If ``wait`` is
    True, a result waits for its audit. A server with policy "warn" can audit in a separate worker instead.
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
        loss: str = "cross-entropy",
    ) -> None:
        """Create the filter. NVFlare writes these arguments into the configuration of a job.

        Args:
            policy: "warn" logs a leak and passes the result on. "block" rejects it, and the server receives a filter
                error. "noise" passes a leaking result to ``noise`` and audits the output.
            noise: Filter that applies the defence, e.g. ``SVTPrivacy(...)``.
            every: Audit only rounds whose number, counted from 1, is a multiple of this.
            budget: Time limit of one audit in seconds.
            out: Folder for reports, with one folder per round and client. None writes no reports.
            model: The network, for labels and replays. Without it, every 2-D weight is tried.
            redact: How reports hide recovered inputs: "omit", "blur" or "none".
            wait: Whether a result waits for its audit. False audits in a worker process and requires policy "warn".
            waiting: Largest number of audits in the worker's queue. Further audits are dropped.
            seed: Random seed of the audits.
            salt: Secret for the pseudonyms of clients in folder names. None draws a random salt.
            loss: Loss of the clients: "cross-entropy", "mse", "bce" or "unknown".
        """
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        if not wait and policy != "warn":
            raise OptionError(f'wait=False requires policy="warn", but policy={policy!r}')
        settings = Settings(model, budget, out, redact, seed, {"platform": "NVFlare"}, loss=loss)
        self.policy, self.noise, self.every, self.budget, self.out = policy, noise, every, budget, out
        self.model, self.redact, self.wait, self.waiting = model, redact, wait, waiting
        self.seed, self.salt, self.loss = seed, salt, loss
        self._gate = Gate(policy, settings, has_noise=noise is not None)
        self._auditor = Auditor(settings, waiting=waiting)
        self._sampler = RoundSampler(None, every)
        self._names = Pseudonyms() if salt is None else Pseudonyms(salt)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Wait for all audits at the end of a run."""
        if event_type == EventType.END_RUN:
            self._auditor.close()

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Store the weights of a task, or audit the update in a result.

        Returns:
            The data to send instead, or None to send the data unchanged.

        Raises:
            ContentBlockedException: If the policy rejects the update.
        """
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            if dxo.data_kind == DataKind.WEIGHTS:
                _store_weights(dxo, shareable, fl_ctx)
            return None
        client = _client(shareable, fl_ctx)
        sent: _Sent | None = fl_ctx.get_prop(f"{SENT}.{client}") or fl_ctx.get_prop(SENT)
        number = _round(dxo, shareable, fl_ctx)
        number = sent.number if number is None and sent is not None else number
        if number is not None and not self._sampler.due(number):
            return None
        name = f"{round_name(number)}/{self._names.of(client)}"

        def job(update: DXO) -> Job:
            return _job(name, sent, update, number)

        def add_noise(update: DXO) -> DXO:
            assert self.noise is not None  # noqa: S101
            return self.noise.process_dxo(update, shareable, fl_ctx) or update

        if not self.wait:
            copy = DXO(dxo.data_kind, dict(dxo.data), dict(dxo.meta))
            self._auditor.submit(name, lambda: job(copy))
            return None
        allowed, reason = self._gate.decide(name, dxo, job, None if self.noise is None else add_noise)
        if allowed is None:
            raise ContentBlockedException(reason)
        return None if allowed is dxo else allowed


def _store_weights(dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
    """Store the weights of a task, for each client if the client is known. Equal weights share one copy.

    A task is sent even if its weights cannot be stored. Its results are then not audited, or they are rejected.
    """
    try:
        weights: Mapping[str, Tensor] = tensors_of(dxo.data)
    except SpearError as error:
        LOGGER.warning("cannot store the weights of the task: %s", error)
        return
    last: _Sent | None = fl_ctx.get_prop(SENT)
    if last is not None and _equal(last.weights, weights):
        weights = last.weights
    sent = _Sent(weights, dict(dxo.meta or {}), _round(dxo, shareable, fl_ctx))
    peer = fl_ctx.get_peer_context()
    # Sticky, because a server receives the result in another context than the one in which it sent the task.
    for name in (SENT, *([] if peer is None else [f"{SENT}.{peer.get_identity_name()}"])):
        fl_ctx.set_prop(name, sent, private=True, sticky=True)


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def _job(name: str, sent: _Sent | None, dxo: DXO, number: int | None) -> Job:
    if sent is None:
        raise DataError("the weights of the task are unknown. Add the filter to the tasks of this side too")
    training = Training.of(sent.meta, dxo.meta or {})
    about = {"round": number, "training": asdict(training)}
    kind: Kind = "deltas" if dxo.data_kind == DataKind.WEIGHT_DIFF else "weights"
    return Job(name, sent.weights, tensors_of(dxo.data), kind, training, about)


def _round(dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> int | None:
    """Return the round, counted from 1 as in reports, or None if it is unknown. NVFlare counts from 0."""
    candidates = [
        shareable.get_header(AppConstants.CURRENT_ROUND),
        (dxo.meta or {}).get(AppConstants.CURRENT_ROUND),
        fl_ctx.get_prop(AppConstants.CURRENT_ROUND),
    ]
    return next((each + 1 for each in candidates if isinstance(each, int)), None)


def _client(shareable: Shareable, fl_ctx: FLContext) -> str:
    """Return the name of the client that computed a result: the sender on a server, the own name on a client."""
    return str(shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, None) or fl_ctx.get_identity_name())
