"""Evidence, without ground truth, that a recovered input is a sample of the batch.

``one_layer`` uses the gradient of one layer and needs all b directions. It compares activation patterns with zeros
(``patterns``), measures how likely agreement is by chance, and asks whether each direction is the only one
with its zeros. ``two_layers`` also uses the next layer, and ``network`` all later layers; both judge
each input on its own. ``joint`` adds what certified inputs say about the others. All return ``Evidence``, which states
what it means that an input is consistent or exact.
If the model is known, replaying an input alone gives further evidence (``spearpp.auditing.signals``).
"""

from spearpp.inversion.evidence.evidence import (
    EXACT,
    WHOLE_NETWORK,
    Evidence,
    chance_in_bits,
    chance_of_zeros,
    pattern_distances,
)
from spearpp.inversion.evidence.joint import certify_together
from spearpp.inversion.evidence.one_layer import certify, certify_many, certify_whole
from spearpp.inversion.evidence.two_layers import agreement, certify_two_layers

__all__ = [
    "EXACT",
    "WHOLE_NETWORK",
    "Evidence",
    "agreement",
    "certify",
    "certify_many",
    "certify_together",
    "certify_two_layers",
    "certify_whole",
    "chance_in_bits",
    "chance_of_zeros",
    "pattern_distances",
]
