"""Evidence, without the truth, that a recovered input is one of the batch.

``masks`` needs one layer and all of its directions; ``strongest`` does with those of the strongest inputs;
``witnessed`` needs the next layer too, and then holds for each input on its own.
"""

from spearpp.certificate.masks import EXACT, Certificates, certify, certify_many, certify_whole, chance_of_zeros, coins
from spearpp.certificate.strongest import Strongest, certify_strongest
from spearpp.certificate.witnessed import WitnessCertificates, agreement, certify_sighted

__all__ = [
    "EXACT",
    "Certificates",
    "Strongest",
    "WitnessCertificates",
    "agreement",
    "certify",
    "certify_many",
    "certify_sighted",
    "certify_strongest",
    "certify_whole",
    "chance_of_zeros",
    "coins",
]
