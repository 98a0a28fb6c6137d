"""Read updates from Flower messages, for the server and the client."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import Message

from spearpp.errors import DataError
from spearpp.integrations.common.federation import Training
from spearpp.integrations.common.job import Job, tensors_of
from spearpp.update import Kind


@dataclass(frozen=True, eq=False)
class Sent:
    """What the server sent to one client. Flower's arrays are immutable bytes, so they are shared, not copied."""

    key: str
    """Name of the array record."""
    arrays: Mapping[str, Any]
    training: Training
    """How the client should train, according to the configuration."""

    @classmethod
    def of(cls, message: Message, *configs: Mapping[str, Any]) -> "Sent | None":
        """Store the first array record of a message to a client. Return None if the message has no array record.

        The record is copied, because a client may change the message that it received. Configurations in the message
        take precedence over ``configs``.
        """
        for key, arrays in message.content.array_records.items():
            return cls(key, dict(arrays), Training.of(*message.content.config_records.values(), *configs))
        return None


def job_of(
    name: str,
    sent: Sent,
    records: Mapping[str, Mapping[str, Any]],
    kind: Kind,
    number: int | None,
    samples: int | None = None,
    client: str | None = None,
) -> Job:
    """Build the audit job for a reply.

    If the reply contains several array records, the audit uses the one with the name under which the weights were sent.
    ``number`` is the round, ``samples`` the number of samples the client trained on, and ``client`` its pseudonym.
    """
    if not records:
        raise DataError("the reply contains no arrays")
    arrays = records.get(sent.key) or next(iter(records.values()))
    before, after = (tensors_of({n: each.numpy() for n, each in part.items()}) for part in (sent.arrays, arrays))
    about: dict[str, Any] = {"round": number, "client": client, "training": asdict(sent.training)}
    if len(records) > 1:
        about["not_audited"] = [key for key in records if records[key] is not arrays]
    return Job(name, before, after, kind, sent.training, about, samples, client)


def samples_of(metrics: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return how many samples a client reports to have trained on (``num-examples``), or None if it does not."""
    for record in metrics.values():
        value = record.get("num-examples")
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value == int(value):
            return int(value)
    return None
