"""Client side of the Flower integration: a mod that audits an update before the client sends it."""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from flwr.app import Context, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from torch import nn

from spearpp.auditing.folder import Redaction
from spearpp.errors import DataError, OptionError
from spearpp.integrations.common.federation import RoundSampler, round_name
from spearpp.integrations.common.job import Job, Settings
from spearpp.integrations.common.policy import Gate, Policy
from spearpp.integrations.flower.records import Sent, job_of, samples_of
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
    loss: str = "cross-entropy",
) -> Mod:
    """Create a mod that audits a client's update before it is sent. Put it first in the list of mods.

    Args:
        policy: "warn" logs a leak and sends the update. "block" sends an error instead. "noise" passes a leaking update
            to ``noise`` and audits the result. "block" and "noise" do not send an update that cannot be audited.
        noise: Mod that applies the defence, e.g. ``flwr.clientapp.mod.LocalDpMod(...)``.
        every: Audit only rounds whose number is a multiple of this, if the server sends the round number.
        budget: Time limit of one audit in seconds. The reply waits for the audit.
        out: Folder for reports. None writes no reports.
        model: The network, for labels and replays. Without it, every 2-D weight is tried.
        kind: Content of the replies: "weights" after training, "deltas" or "gradients".
        redact: How reports hide recovered inputs: "omit", "blur" or "none".
        seed: Random seed of the audits.
        loss: Loss of the client: "cross-entropy", "mse", "bce" or "unknown".

    Returns:
        A mod for ``flwr.clientapp.ClientApp``.
    """
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    settings = Settings(model, budget, out, redact, seed, {"platform": "Flower"}, loss=loss)
    gate = Gate(policy, settings, has_noise=noise is not None)
    sampler = RoundSampler(None, every)

    def mod(message: Message, context: Context, call_next: Next) -> Message:
        if not str(message.metadata.message_type).startswith(MessageType.TRAIN):
            return call_next(message, context)
        sent = Sent.of(message, context.run_config)
        configs: list[Mapping[str, Any]] = [*message.content.config_records.values(), context.run_config]
        rounds = (each.get("server-round") for each in configs)
        number = next((each for each in rounds if isinstance(each, int)), None)
        reply = call_next(message, context)
        if reply.has_error() or (number is not None and not sampler.due(number)):
            return reply
        name = f"{round_name(number)}/own"

        def job(update: Message) -> Job:
            if update.has_error():
                raise DataError(f"the noise mod returned an error: {update.error.reason}")
            if sent is None:
                raise DataError("the server sent no arrays, so the weights before training are unknown")
            if policy != "warn" and len(update.content.array_records) > 1:
                names = ", ".join(update.content.array_records)
                raise DataError(f"the reply contains several array records ({names}), but only one can be audited")
            samples = samples_of(update.content.metric_records)
            return job_of(name, sent, update.content.array_records, kind, number, samples)

        def add_noise(update: Message) -> Message:
            assert noise is not None  # noqa: S101
            return noise(message, context, lambda _message, _context: update)

        decision = gate.decide(name, reply, job, None if noise is None else add_noise)
        allowed, reason = decision  # in a line of its own, so that mypy takes the type of the payload from the reply
        if allowed is not None:
            return allowed
        return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)

    return mod
