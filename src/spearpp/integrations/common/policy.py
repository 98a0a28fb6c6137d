"""What becomes of an update that is about to leave."""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar

from spearpp.errors import OptionError, SpearError
from spearpp.integrations.common.job import Job, Outcome, Settings, perform

Policy = Literal["warn", "block", "noise"]
POLICIES: tuple[Policy, ...] = ("warn", "block", "noise")
Payload = TypeVar("Payload")
LOGGER = logging.getLogger("spearpp.integrations")


class Gate:
    """Audits what is about to leave, on the spot, and lets it pass, stops it or has noise put on it.

    ``warn`` always lets an update pass. ``block`` stops an update that leaks, or that recovered inputs fit without
    proof. ``noise`` hands such an update to a defence, audits the result again, and stops it if it still leaks. Both
    stop what cannot be audited: a gate must not open because its check failed.
    """

    def __init__(self, policy: Policy, settings: Settings, *, has_noise: bool) -> None:
        if policy not in POLICIES:
            raise OptionError(f"policy={policy!r}: one of {', '.join(POLICIES)}")
        if (policy == "noise") != has_noise:
            raise OptionError('policy="noise" needs noise=, the defence to hand over to; other policies take none')
        self.policy, self.settings = policy, settings

    def settle(
        self,
        name: str,
        payload: Payload,
        job: Callable[[Payload], Job],
        noise: Callable[[Payload], Payload] | None = None,
    ) -> tuple[Payload | None, str]:
        """What may leave, or None, and why."""
        first = self._audited(name, payload, job)
        if self.policy == "warn" or not _stops(first):
            return payload, first.summary
        if noise is None or first.verdict is None:
            return None, _refusal(first)
        changed = noise(payload)
        second = self._audited(name, changed, job)
        if _stops(second):
            return None, f"after noise: {_refusal(second)}"
        return changed, f"{first.summary}; after noise: {second.summary}"

    def _audited(self, name: str, payload: Payload, job: Callable[[Payload], Job]) -> Outcome:
        try:
            outcome = perform(job(payload), self.settings)
        except SpearError as error:
            outcome = Outcome.failed(name, f"not audited: {error}")
        except Exception as error:  # what a platform holds may break anything; the policy says what becomes of it
            outcome = Outcome.failed(name, f"not audited: it cannot be read: {type(error).__name__}: {error}")
        tell(outcome)
        return outcome


def tell(outcome: Outcome) -> None:
    """Log what came of an audit: a leak or a problem as a warning."""
    serious = outcome.leaks or outcome.fitting > 0 or outcome.problem is not None
    words = outcome.summary if outcome.problem in (None, outcome.summary) else f"{outcome.summary} ({outcome.problem})"
    LOGGER.log(logging.WARNING if serious else logging.INFO, "%s: %s", outcome.name, words)


def _stops(outcome: Outcome) -> bool:
    return outcome.leaks or outcome.fitting > 0 or outcome.verdict is None


def _refusal(outcome: Outcome) -> str:
    if outcome.verdict is None:
        return f"spearpp refused to send this update: {outcome.summary}"
    found = f"{outcome.recovered} of {outcome.batch_estimate} training inputs can be recovered from it"
    if not outcome.recovered:
        found = f"{outcome.fitting} inputs fit it, which may be training inputs"
    return f"spearpp refused to send this update: {found}"
