"""Evidence, without ground truth, that a recovered input is a sample of the batch.

``one_layer`` uses the gradient of one layer and needs all b directions. ``two_layers`` also uses the next layer, and
``network`` all later layers; both judge each input on its own. ``joint`` adds what certified inputs say about the
others. All return ``Evidence``, and one rule decides which
inputs are certified. Replaying
an input alone through the model gives stronger evidence (``spearpp.auditing.signals``), where a model is known.
"""

from spearpp.inversion.evidence.chance import chance_of_zeros, coins
from spearpp.inversion.evidence.evidence import EXACT, WHOLE_NETWORK, Evidence
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
    "chance_of_zeros",
    "coins",
]
