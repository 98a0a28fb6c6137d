"""Decide whether an update may be sent."""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

from spearpp.errors import OptionError, SpearError
from spearpp.integrations.common.job import LOGGER, Job, Settings, perform
from spearpp.integrations.common.outcome import Outcome

Policy = Literal["warn", "block", "noise"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Payload = TypeVar("Payload")


class Gate:
    """Audit an update before it is sent, and decide what to send.

    ``warn`` always sends the update. ``block`` rejects an update that leaks, or for which recovered inputs fit without
    proof. ``noise`` passes such an update to a defence, audits the result, and rejects it if it still leaks. ``block``
    and ``noise`` also reject an update that cannot be audited: a gate must not open because its check failed.
    """

    def __init__(self, policy: Policy, settings: Settings, *, has_noise: bool) -> None:
        if policy not in POLICIES:
            raise OptionError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
        if (policy == "noise") != has_noise:
            raise OptionError('policy="noise" needs noise=, the defence to apply. Other policies accept no noise')
        self.policy, self.settings = policy, settings

    def decide(
        self,
        name: str,
        payload: Payload,
        job: Callable[[Payload], Job],
        noise: Callable[[Payload], Payload] | None = None,
    ) -> tuple[Payload | None, str]:
        """Audit a payload and decide what to send.

        The payload is the update in the platform's own format, and ``job`` converts it. ``noise`` applies a defence.

        Returns:
            The payload to send, or None to send nothing, and the reason.
        """
        first = self._audit(name, payload, job)
        if self.policy == "warn" or not _rejected(first):
            return payload, first.summary
        if noise is None or first.verdict is None:
            return None, _reason(first)
        defended = noise(payload)
        second = self._audit(name, defended, job)
        if _rejected(second):
            return None, f"after noise: {_reason(second)}"
        return defended, f"{first.summary}; after noise: {second.summary}"

    def _audit(self, name: str, payload: Payload, job: Callable[[Payload], Job]) -> Outcome:
        try:
            outcome = perform(job(payload), self.settings)
        except SpearError as error:
            outcome = Outcome.failed(name, f"not audited: {error}")
        except Exception as error:  # Data from a platform can raise any exception. The policy decides what happens.
            outcome = Outcome.failed(name, f"not audited: cannot read the update: {type(error).__name__}: {error}")
        log_outcome(outcome)
        return outcome


def log_outcome(outcome: Outcome) -> None:
    """Log the result of an audit: a leak or a problem as a warning, everything else as information."""
    serious = outcome.leaks or outcome.fitting > 0 or outcome.problem is not None
    text = outcome.summary if outcome.problem in (None, outcome.summary) else f"{outcome.summary} ({outcome.problem})"
    LOGGER.log(logging.WARNING if serious else logging.INFO, "%s: %s", outcome.name, text)


def _rejected(outcome: Outcome) -> bool:
    return outcome.leaks or outcome.fitting > 0 or outcome.verdict is None


def _reason(outcome: Outcome) -> str:
    if outcome.verdict is None:
        reason = outcome.summary
    elif outcome.recovered:
        reason = f"{outcome.recovered} of {outcome.batch_estimate} training inputs can be recovered from it"
    else:
        reason = f"{outcome.fitting} computed inputs fit it and may be training inputs"
    return f"spearpp refused to send this update: {reason}"
