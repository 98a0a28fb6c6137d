"""Evidence, without ground truth, that a recovered input is a sample of the batch.

``one_layer`` uses the gradient of one layer and needs all b directions. ``two_layers`` also uses the next layer and
then judges each input on its own. Both return ``Evidence``, and one rule decides which inputs are certified. Replaying
an input alone through the model gives stronger evidence (``spearpp.auditing.signals``), where a model is known.
"""

from spearpp.inversion.evidence.chance import chance_of_zeros, coins
from spearpp.inversion.evidence.evidence import EXACT, Evidence
from spearpp.inversion.evidence.one_layer import certify, certify_many, certify_whole
from spearpp.inversion.evidence.two_layers import agreement, certify_two_layers

__all__ = [
    "EXACT",
    "Evidence",
    "agreement",
    "certify",
    "certify_many",
    "certify_two_layers",
    "certify_whole",
    "chance_of_zeros",
    "coins",
]
