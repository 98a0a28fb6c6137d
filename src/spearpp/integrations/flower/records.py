"""Read updates from Flower messages, for the server and the client."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import ArrayRecord

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


def first_record(records: Mapping[str, ArrayRecord]) -> tuple[str, ArrayRecord] | None:
    """Return the name and the content of the first array record, or None if there is no record."""
    return next(iter(records.items()), None)


def job_of(
    name: str,
    sent: Sent,
    records: Mapping[str, Mapping[str, Any]],
    kind: Kind,
    training: Training,
    number: int | None,
    samples: int | None = None,
    client: str | None = None,
) -> Job:
    """Build the audit job for a reply.

    If the reply contains several array records, the audit uses the one with the name under which the weights were sent.

    Args:
        name: Name of the audit.
        sent: What the server sent to the client.
        records: Array records of the reply.
        kind: Content of the arrays.
        training: How the client trained.
        number: Round of the reply, if known.
        samples: Number of samples the client trained on, if known.
        client: Pseudonym of the client, for its history.

    Raises:
        SpearError: If there is no array record, or if it does not contain numbers.
    """
    if not records:
        raise DataError("the reply contains no arrays")
    arrays = records.get(sent.key) or next(iter(records.values()))
    before, after = (tensors_of({n: each.numpy() for n, each in part.items()}) for part in (sent.arrays, arrays))
    about: dict[str, Any] = {"round": number, "client": client, "training": asdict(training)}
    if len(records) > 1:
        about["not_audited"] = [key for key in records if records[key] is not arrays]
    return Job(name, before, after, kind, training, about, samples, client)


def samples_of(metrics: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return how many samples a client reports to have trained on (``num-examples``), or None if it does not."""
    for record in metrics.values():
        value = record.get("num-examples")
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value == int(value):
            return int(value)
    return None
