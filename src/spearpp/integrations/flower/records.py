"""What Flower's messages hold of an update, on either side."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import ArrayRecord

from spearpp.errors import DataError
from spearpp.integrations.common import Job, Training, tensors_of
from spearpp.update import Kind


@dataclass(frozen=True, eq=False)
class Sent:
    """What went to one client. Flower's arrays are bytes that nobody changes, so they are shared, not copied."""

    key: str
    arrays: Mapping[str, Any]
    training: Training


def first_record(records: Mapping[str, ArrayRecord]) -> tuple[str, ArrayRecord] | None:
    """The first record of arrays and its name; None if there is none."""
    return next(iter(records.items()), None)


def job_of(
    name: str,
    sent: Sent,
    records: Mapping[str, Mapping[str, Any]],
    kind: Kind,
    training: Training,
    number: int | None,
    samples: int | None = None,
) -> Job:
    """What to audit: of several records that of the name the weights were sent under.

    Raises:
        SpearError: if there is none, or it holds no numbers.
    """
    if not records:
        raise DataError("the reply holds no arrays")
    arrays = records.get(sent.key) or next(iter(records.values()))
    before, after = (tensors_of({n: each.numpy() for n, each in part.items()}) for part in (sent.arrays, arrays))
    about: dict[str, Any] = {"round": number, "training": asdict(training)}
    if len(records) > 1:
        about["not_audited"] = [name for name in records if records[name] is not arrays]
    return Job(name, before, after, kind, training, about, samples)


def samples_of(metrics: Mapping[str, Mapping[str, Any]]) -> int | None:
    """How many samples a client says it trained on: Flower's ``num-examples``; None if it does not say so."""
    for record in metrics.values():
        value = record.get("num-examples")
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value == int(value):
            return int(value)
    return None
