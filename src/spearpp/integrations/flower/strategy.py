"""Server side of the Flower integration: a strategy that wraps another strategy and audits its clients."""

from collections import Counter
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy
from torch import nn

from spearpp.auditing.folder import Redaction
from spearpp.errors import OptionError, SpearError
from spearpp.integrations.common.federation import Pseudonyms, RoundSampler, round_name, round_number
from spearpp.integrations.common.job import LOGGER, Settings
from spearpp.integrations.common.outcome import Outcome
from spearpp.integrations.common.worker import Auditor
from spearpp.integrations.flower.records import Sent, job_of, samples_of
from spearpp.report import timeline
from spearpp.update import KINDS, Kind

if TYPE_CHECKING:
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result

VERDICTS = {"NOT_APPLICABLE": -1, "NOT_FOUND": 0, "LEAKS": 1}
"""Verdicts as numbers, because Flower metrics contain only numbers."""
METRICS = ("leak_verdict", "recovered", "batch_estimate")


class AuditStrategy(Strategy):
    """Wrap any strategy and audit what its clients send.

    Every call goes to the inner strategy unchanged, and its result is returned, so the training is the same as without
    audits. Only the metrics of a round get further entries: ``leak_verdict`` (1 leaks, 0 not found, -1 not applicable),
    ``recovered`` and ``batch_estimate`` of the worst audit, and the number of audits that finished, failed or were
    dropped. During training these entries cover all audits so far. With ``wait``, and in the result of ``start``, they
    cover the audits of the round itself. Reading or writing any other attribute accesses the inner strategy.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = AuditStrategy(FedAvg(min_train_nodes=3), every=5)
    >>> strategy.min_train_nodes
    3
    """

    _own_attributes = frozenset(
        {
            *("inner", "auditor", "kind", "wait"),
            *("_sampler", "_names", "_sent", "_dropped", "_configure", "_aggregate", "_shown"),
        }
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
        history: int = 0,
        seed: int = 0,
        salt: str | None = None,
        loss: str = "cross-entropy",
    ) -> None:
        """Wrap a strategy.

        Args:
            inner: The strategy that trains the model.
            every: Audit only rounds whose number is a multiple of this.
            sample: Number of replies to audit per round, chosen at random. None audits all replies.
            budget: Time limit of one audit in seconds.
            out: Folder for reports, with one folder per round and client. None writes no reports.
            model: The network, for labels and replays. Without it, every 2-D weight is tried.
            kind: Content of the replies: "weights" after training, "deltas" or "gradients".
            redact: How reports hide recovered inputs: "omit", "blur" or "none".
            waiting: Largest number of audits in the queue. Further audits are dropped and counted.
            wait: Whether each round waits for its audits, so that its metrics contain their results.
            history: Number of earlier audited rounds of each client that are kept on disk, under a pseudonym, and
                audited together with the new one. ``sample`` then chooses the same clients in every round. The kept
                rounds are deleted when the strategy is closed, or after a week. 0 keeps none.
            seed: Random seed of the choice of replies and of the audits.
            salt: Secret for the pseudonyms of clients in folder names. The same salt gives the same names. None draws a
                random salt.
            loss: Loss of the clients: "cross-entropy", "mse", "bce" or "unknown".
        """
        if not isinstance(inner, Strategy):
            raise OptionError(f"inner is a {type(inner).__name__}: expected a flwr.serverapp.strategy.Strategy")
        if kind not in KINDS:
            raise OptionError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
        self.inner = inner
        about = {"platform": "Flower", "model": None if model is None else type(model).__name__}
        settings = Settings(model, budget, out, redact, seed, about, history=history, loss=loss)
        self.auditor = Auditor(settings, waiting=waiting)
        self._sampler = RoundSampler(sample, every, seed)
        self.kind, self.wait = kind, wait
        self._names = Pseudonyms() if salt is None else Pseudonyms(salt)
        self._sent: dict[int, Sent] = {}
        self._dropped: Counter[int] = Counter()
        """Number of dropped audits per round."""
        self._shown = 0
        """Number of audits in the timeline."""
        self._configure, self._aggregate = inner.configure_train, inner.aggregate_train

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._own_attributes:  # The attribute is not set yet, for example while unpickling.
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._own_attributes:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def start(self, *args: Any, **kwargs: Any) -> "Result":
        """Run the inner strategy's ``start``, and then wait for all audits.

        The metrics in the result are complete: those of each round cover its own audits.
        """
        before = len(self.auditor.outcomes)
        self._dropped = Counter()
        hooks = {"configure_train": self.configure_train, "aggregate_train": self.aggregate_train}
        replaced = {name: vars(self.inner)[name] for name in hooks if name in vars(self.inner)}
        vars(self.inner).update(hooks)  # Instance attributes take precedence over the methods of the class.
        try:
            result = self.inner.start(*args, **kwargs)
        finally:
            for name in hooks:
                del vars(self.inner)[name]
            vars(self.inner).update(replaced)
            self.close()
        by_round: dict[int, list[Outcome]] = {number: [] for number in self._dropped}
        for outcome in self.auditor.outcomes[before:]:
            by_round.setdefault(round_number(outcome.name), []).append(outcome)
        shown = result.train_metrics_clientapp
        for number, outcomes in by_round.items():
            if (metrics := _with_audits(shown.get(number), outcomes, self._dropped[number])) is not None:
                shown[number] = metrics
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: "Grid"
    ) -> Iterable[Message]:
        """Return the inner strategy's messages, and store what each client is sent until the round ends."""
        messages = list(self._configure(server_round, arrays, config, grid))
        self._sent = {}
        if self._sampler.due(server_round):
            for message in messages:
                if (sent := Sent.of(message)) is not None:
                    self._sent[message.metadata.dst_node_id] = sent
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Submit the chosen replies for audit, and return the inner strategy's aggregate of all replies."""
        replies, before = list(replies), len(self.auditor.outcomes)
        valid = [each for each in replies if not each.has_error() and each.metadata.src_node_id in self._sent]
        if self.auditor.settings.history:  # rounds of the same clients say more than rounds of others
            valid.sort(key=lambda each: self._names.of(each.metadata.src_node_id))
            chosen = valid[: self._sampler.count] if self._sampler.due(server_round) else []
        else:
            chosen = [valid[index] for index in self._sampler.among(server_round, valid)]
        for reply in chosen:
            self._submit(server_round, reply)
        self._sent = {}
        arrays, metrics = self._aggregate(server_round, replies)
        self._write_timeline()
        if not self.wait:
            return arrays, _with_audits(metrics, self.auditor.outcomes, self.auditor.dropped)
        own = [each for each in self.auditor.finish()[before:] if round_number(each.name) == server_round]
        return arrays, _with_audits(metrics, own, self._dropped[server_round])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: "Grid"
    ) -> Iterable[Message]:
        """Call the inner strategy."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Call the inner strategy."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Call the inner strategy."""
        self.inner.summary()

    @property
    def outcomes(self) -> list[Outcome]:
        """Results of the finished audits."""
        return self.auditor.outcomes

    def finish(self) -> list[Outcome]:
        """Wait for all audits and return their results."""
        return self.auditor.finish()

    def close(self) -> None:
        """Wait for all audits, stop the worker, and delete the kept rounds of the clients."""
        self.auditor.close()
        self._write_timeline()
        rounds = self.auditor.settings.rounds
        if rounds is not None:
            rounds.clear()

    def _write_timeline(self) -> None:
        """Add the audits that have finished meanwhile to ``timeline.html`` in the folder for reports."""
        out, new = self.auditor.settings.out, self.auditor.outcomes[self._shown :]
        if out is None or not new:
            return
        self._shown += len(new)
        try:
            timeline.add(Path(out), [each.entry(Path(out)) for each in new])
        except (SpearError, OSError) as error:
            LOGGER.warning("cannot write the timeline: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit(self, number: int, reply: Message) -> None:
        node = reply.metadata.src_node_id
        sent, client = self._sent[node], self._names.of(node)
        name = f"{round_name(number)}/{client}"
        # Copy the records now, because a strategy may replace the content of a reply.
        records = {key: dict(record) for key, record in reply.content.array_records.items()}
        kind, samples = self.kind, samples_of(reply.content.metric_records)
        if not self.auditor.submit(name, lambda: job_of(name, sent, records, kind, number, samples, client)):
            self._dropped[number] += 1


def _with_audits(metrics: MetricRecord | None, outcomes: Sequence[Outcome], dropped: int) -> MetricRecord | None:
    """Add the worst of these audits, and the numbers of audits, to the metrics of a round."""
    if not outcomes and not dropped:
        return metrics
    metrics = MetricRecord() if metrics is None else metrics
    for name in METRICS:
        metrics.pop(name, None)  # Remove entries of earlier audits.
    audited = [each for each in outcomes if each.verdict is not None]
    if audited:
        worst = max(audited, key=lambda each: (VERDICTS[str(each.verdict)], each.recovered))
        metrics["leak_verdict"] = VERDICTS[str(worst.verdict)]
        metrics["recovered"] = worst.recovered
        metrics["batch_estimate"] = worst.batch_estimate
    metrics["audits_done"] = len(audited)
    metrics["audits_failed"] = len(outcomes) - len(audited)
    metrics["audits_dropped"] = dropped
    return metrics
