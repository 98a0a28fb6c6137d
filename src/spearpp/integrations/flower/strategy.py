"""The server's side: a strategy around any other."""

from collections import Counter
from collections.abc import Iterable, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy
from torch import nn

from spearpp.auditing.folder import Redaction
from spearpp.errors import OptionError
from spearpp.integrations.common import (
    Auditor,
    Outcome,
    Pseudonyms,
    RoundSampler,
    Settings,
    Training,
    round_name,
    round_number,
)
from spearpp.integrations.flower.records import Sent, first_record, job_of, samples_of
from spearpp.update import KINDS, Kind

if TYPE_CHECKING:
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result

VERDICTS = {"NOT_APPLICABLE": -1, "NOT_FOUND": 0, "LEAKS": 1}
"""Verdicts as metrics, which hold numbers alone."""
METRICS = ("leak_verdict", "recovered", "batch_estimate")


class AuditStrategy(Strategy):
    """Any strategy, with audits of what its clients send.

    Every call reaches the inner strategy as it was made, and what it returns comes back: the model is trained as it
    would be without. Only the round's metrics gain ``leak_verdict`` (1 leaks, 0 not found, -1 not applicable),
    ``recovered`` and ``batch_estimate`` of the worst audit, and how many audits were done, failed or were dropped: of
    all audits so far while rounds go on, of the round's own with ``wait`` and in what ``start`` returns. All other
    attributes are the inner strategy's, to read and to write.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = AuditStrategy(FedAvg(min_train_nodes=3), every=5)
    >>> strategy.min_train_nodes
    3
    """

    _own = frozenset(
        {"inner", "auditor", "choice", "kind", "wait", "_names", "_sent", "_dropped", "_configure", "_aggregate"}
    )

    def __init__(
        self,
        inner: Strategy,
        every: int = 1,
        sample: int | None = 1,
        budget: float | None = 30.0,
        out: str | PathLike[str] | None = "audits",
        model: nn.Module | None = None,
        *,
        kind: Kind = "weights",
        redact: Redaction = "omit",
        waiting: int = 4,
        wait: bool = False,
        seed: int = 0,
        salt: str | None = None,
    ) -> None:
        """Wrap a strategy.

        Args:
            inner: the strategy that does the work.
            every: audit rounds that this number divides.
            sample: how many replies of such a round, chosen at random by ``seed``; None for all.
            budget: seconds for one audit.
            out: folder for reports, one for each round and client; None for none.
            model: the network, for labels and replays; without it every 2-D weight is tried.
            kind: what replies hold: "weights" after training, "deltas" or "gradients".
            redact: "omit", "blur" or, to keep what was recovered in the reports, "none".
            waiting: audits that may wait; more are dropped, and counted.
            wait: hold each round up until its audits are done, to have them in its own metrics.
            seed: of the choice and of the audits.
            salt: for the names of clients in folders; one salt gives one name. None draws one.
        """
        if not isinstance(inner, Strategy):
            raise OptionError(f"inner is a {type(inner).__name__}: expected a flwr.serverapp.strategy.Strategy")
        if kind not in KINDS:
            raise OptionError(f"kind={kind!r}: one of {', '.join(KINDS)}")
        self.inner = inner
        self.auditor = Auditor(Settings(model, budget, out, redact, seed, {"platform": "Flower"}), waiting=waiting)
        self.choice = RoundSampler(sample, every, seed)
        self.kind, self.wait = kind, wait
        self._names = Pseudonyms() if salt is None else Pseudonyms(salt)
        self._sent: dict[int, Sent] = {}
        self._dropped: Counter[int] = Counter()
        """Audits that were dropped, by round."""
        self._configure, self._aggregate = inner.configure_train, inner.aggregate_train

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._own:  # not there yet: it is no attribute of the inner strategy either
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def start(self, *args: Any, **kwargs: Any) -> "Result":
        """The inner strategy's own ``start``, whoever wrote it; then wait for the audits that are under way.

        The result's metrics are then complete: those of a round tell of its own audits.
        """
        before = len(self.auditor.outcomes)
        self._dropped = Counter()
        hooks = {"configure_train": self.configure_train, "aggregate_train": self.aggregate_train}
        kept = {name: vars(self.inner)[name] for name in hooks if name in vars(self.inner)}
        vars(self.inner).update(hooks)  # before the class's own methods
        try:
            result = self.inner.start(*args, **kwargs)
        finally:
            for name in hooks:
                del vars(self.inner)[name]
            vars(self.inner).update(kept)
            self.close()
        own: dict[int, list[Outcome]] = {number: [] for number in self._dropped}
        for outcome in self.auditor.outcomes[before:]:
            own.setdefault(round_number(outcome.name), []).append(outcome)
        for number, outcomes in own.items():
            metrics = _with_audits(result.train_metrics_clientapp.get(number), outcomes, self._dropped[number])
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: "Grid"
    ) -> Iterable[Message]:
        """The inner strategy's messages; what each client is sent is remembered until the round ends."""
        messages = list(self._configure(server_round, arrays, config, grid))
        self._sent = {}
        if self.choice.due(server_round):
            for message in messages:
                record = first_record(message.content.array_records)
                if record is not None:
                    configs = message.content.config_records.values()
                    self._sent[message.metadata.dst_node_id] = Sent(record[0], dict(record[1]), Training.of(*configs))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the inner strategy makes of all replies; chosen ones are audited meanwhile."""
        replies, before = list(replies), len(self.auditor.outcomes)
        sound = [each for each in replies if not each.has_error() and each.metadata.src_node_id in self._sent]
        for index in self.choice.among(server_round, sound):
            self._submit(server_round, sound[index])
        self._sent = {}
        arrays, metrics = self._aggregate(server_round, replies)
        if not self.wait:
            return arrays, _with_audits(metrics, self.auditor.outcomes, self.auditor.dropped)
        own = [each for each in self.auditor.finish()[before:] if round_number(each.name) == server_round]
        return arrays, _with_audits(metrics, own, self._dropped[server_round])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: "Grid"
    ) -> Iterable[Message]:
        """The inner strategy's."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The inner strategy's."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """The inner strategy's."""
        self.inner.summary()

    @property
    def outcomes(self) -> list[Outcome]:
        """What came of the audits that are done."""
        return self.auditor.outcomes

    def finish(self) -> list[Outcome]:
        """Wait for all audits; what came of them."""
        return self.auditor.finish()

    def close(self) -> None:
        """Wait for all audits, and end their worker."""
        self.auditor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit(self, number: int, reply: Message) -> None:
        node = reply.metadata.src_node_id
        sent, name = self._sent[node], f"{round_name(number)}/{self._names.of(node)}"
        # Taken now: a strategy may replace what a reply holds.
        records = {key: dict(record) for key, record in reply.content.array_records.items()}
        kind, training, samples = self.kind, sent.training, samples_of(reply.content.metric_records)
        if not self.auditor.submit(name, lambda: job_of(name, sent, records, kind, training, number, samples)):
            self._dropped[number] += 1


def _with_audits(metrics: MetricRecord | None, done: Sequence[Outcome], dropped: int) -> MetricRecord | None:
    """A round's metrics, with the worst of these audits and how many there were."""
    if not done and not dropped:
        return metrics
    metrics = MetricRecord() if metrics is None else metrics
    for name in METRICS:
        metrics.pop(name, None)  # of audits so far
    audited = [each for each in done if each.verdict is not None]
    if audited:
        worst = max(audited, key=lambda each: (VERDICTS[str(each.verdict)], each.recovered))
        metrics["leak_verdict"] = VERDICTS[str(worst.verdict)]
        metrics["recovered"] = worst.recovered
        metrics["batch_estimate"] = worst.batch_estimate
    metrics["audits_done"] = len(audited)
    metrics["audits_failed"] = len(done) - len(audited)
    metrics["audits_dropped"] = dropped
    return metrics
