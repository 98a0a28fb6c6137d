"""The client's side: a mod that audits what is about to leave."""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from flwr.app import Context, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from torch import nn

from spearpp.auditing.folder import Redaction
from spearpp.errors import DataError, OptionError
from spearpp.integrations.common import Gate, Job, Policy, RoundSampler, Settings, Training, round_name
from spearpp.integrations.flower.records import Sent, first_record, job_of, samples_of
from spearpp.update import KINDS, Kind

Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]


def audit_mod(
    policy: Policy = "warn",
    *,
    noise: Mod | None = None,
    every: int = 1,
    budget: float | None = 30.0,
    out: str | PathLike[str] | None = None,
    model: nn.Module | None = None,
    kind: Kind = "weights",
    redact: Redaction = "omit",
    seed: int = 0,
) -> Mod:
    """A mod with which a client audits exactly what it is about to send; put it first in the list of mods.

    Args:
        policy: "warn" logs a leak and sends; "block" sends an error instead; "noise" hands what leaks over to ``noise``
            and audits that again. "block" and "noise" do not send what cannot be audited.
        noise: the mod to hand over to, e.g. ``flwr.clientapp.mod.LocalDpMod(...)``.
        every: audit rounds that this number divides, where the server says which round it is.
        budget: seconds for one audit; the reply waits for it.
        out: folder for reports; None writes none.
        model: the network, for labels and replays; without it every 2-D weight is tried.
        kind: what replies hold: "weights" after training, "deltas" or "gradients".
        redact: "omit", "blur" or "none" of what was recovered, in reports.
        seed: of the audits.
    """
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r}: one of {', '.join(KINDS)}")
    gate = Gate(policy, Settings(model, budget, out, redact, seed, {"platform": "Flower"}), has_noise=noise is not None)
    choice = RoundSampler(None, every)

    def mod(message: Message, context: Context, call_next: Next) -> Message:
        if not str(message.metadata.message_type).startswith(MessageType.TRAIN):
            return call_next(message, context)
        # A client may change what it was sent: remembered before.
        record = first_record(message.content.array_records)
        sent = None if record is None else (record[0], dict(record[1]))
        configs: list[Mapping[str, Any]] = [*message.content.config_records.values(), context.run_config]
        rounds = (each.get("server-round") for each in configs)
        number = next((each for each in rounds if isinstance(each, int)), None)
        reply = call_next(message, context)
        if reply.has_error() or (number is not None and not choice.due(number)):
            return reply
        name = f"{round_name(number)}/own"

        def job(what: Message) -> Job:
            if what.has_error():
                raise DataError(f"the noise mod gave an error: {what.error.reason}")
            if sent is None:
                raise DataError("the server sent no arrays: there are no weights to audit against")
            if policy != "warn" and len(what.content.array_records) > 1:
                names = ", ".join(what.content.array_records)
                raise DataError(f"the reply holds several records of arrays ({names}), of which one would be audited")
            training = Training.of(*configs)
            samples = samples_of(what.content.metric_records)
            return job_of(name, Sent(*sent, training), what.content.array_records, kind, training, number, samples)

        def noised(what: Message) -> Message:
            assert noise is not None  # noqa: S101
            return noise(message, context, lambda _message, _context: what)

        settled = gate.settle(name, reply, job, None if noise is None else noised)
        leaves, why = settled
        if leaves is not None:
            return leaves
        return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=why), reply_to=message)

    return mod
