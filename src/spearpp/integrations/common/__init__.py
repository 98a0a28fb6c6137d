"""Code that all integrations share: jobs and reports, the worker and its queue, policies, sampling and names."""

from spearpp.integrations.common.job import Job, Outcome, Settings, perform, tensors_of
from spearpp.integrations.common.naming import Pseudonyms, round_name, round_number
from spearpp.integrations.common.policy import POLICIES, Gate, Policy
from spearpp.integrations.common.round_sampler import RoundSampler
from spearpp.integrations.common.training import Training
from spearpp.integrations.common.worker import Auditor

__all__ = [
    "POLICIES",
    "Auditor",
    "Gate",
    "Job",
    "Outcome",
    "Policy",
    "Pseudonyms",
    "RoundSampler",
    "Settings",
    "Training",
    "perform",
    "round_name",
    "round_number",
    "tensors_of",
]
