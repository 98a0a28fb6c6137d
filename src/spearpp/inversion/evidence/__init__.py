"""Evidence, without the truth, that a recovered input is one of the batch.

``masks`` needs one layer and all of its directions; ``witnessed`` needs the next layer too, and then holds for each
input on its own. Replaying an input alone through the model is stronger evidence than both
(``spearpp.auditing.signals``).
"""

from spearpp.inversion.evidence.chance import chance_of_zeros, coins
from spearpp.inversion.evidence.masks import EXACT, Certificates, certify, certify_many, certify_whole
from spearpp.inversion.evidence.witnessed import WitnessCertificates, agreement, certify_sighted

__all__ = [
    "EXACT",
    "Certificates",
    "WitnessCertificates",
    "agreement",
    "certify",
    "certify_many",
    "certify_sighted",
    "certify_whole",
    "chance_of_zeros",
    "coins",
]
