"""Terms of the report, each explained for readers who do not know the method."""

from collections.abc import Collection

from spearpp.auditing import Kind

GENERAL = {
    "update": "What a client sends to the server after training: gradients, weights or differences of weights.",
    "certified": "The update itself proves that the input is a training sample, or a mean of samples that the update "
    "cannot distinguish, up to a relative error of 0.001. The proof needs no original data.",
    "relative error": "Size of the deviation divided by the size of the input. A stated error is an estimate from the "
    "noise of the update. In tests the true error was at most three times as large.",
    "dB": "Decibels of the PSNR (peak signal-to-noise ratio), which compares a recovered input with the original. "
    "20 dB more mean a tenth of the error. Images above about 40 dB look identical, and 90 dB is a difference of "
    "0.00003 of the range.",
    "batch size": "Number of training samples in the update, as the rank of a layer's gradient shows it.",
    "layer": "One Linear layer of the network. Its gradient is a sum over the samples, from which the audit computes "
    "the inputs of the layer.",
    "features": "Numbers that earlier layers compute from a sample. They are not the data itself.",
    "replay": "The audit trains on the recovered samples again and compares the result with the client's update. A "
    "small difference proves that these samples produced the update.",
    "ε (epsilon)": "Privacy loss in differential privacy. A smaller ε is a stronger guarantee. A privacy accountant "
    "computes ε from the noise that the client adds. This audit does not measure ε.",
    "DP-SGD": "Training with a limited contribution of each sample and with added noise, so that ε is known.",
    "secure aggregation": "The server sees only the sum of many clients' updates.",
    "severity": "critical: inputs of the model were certified. high: inputs were recovered up to a stated error, or "
    "features or a vocabulary were recovered. medium: computed inputs fit the update without proof. low: nothing was "
    "found. unknown: the audit could not test the update, or was interrupted before it found anything.",
    "accepted": "Somebody accepted this leak in spearpp.toml, with a reason and a last day. An accepted leak does not "
    "fail the gate.",
}
"""General terms. The key is the term."""
CLAIMS = {
    Kind.ONE: "The input is one training sample, exact up to a relative error of 0.001.",
    Kind.ONE_OR_MEAN: "The input is one training sample, or the weighted mean of several samples that the update "
    "cannot distinguish.",
    Kind.APPROXIMATE: "The input is one training sample or a weighted mean, up to a stated error that is visible.",
    Kind.SEVERAL: "The input has the signal of several samples: their mean, or one sample that occurs several times. "
    "It does not count as recovered.",
    Kind.FITS: "The input fits the gradient, but nothing proves that it is a sample. It does not count as recovered.",
    Kind.NONE: "Nothing is claimed about the input.",
}
"""What each claim says."""
NUMBERS = {
    "error": "Stated relative error of this input: an estimate, not a bound.",
    "samples": "Number of training samples that this input represents.",
    "apart": "If the input is a mean: how far its samples can be from it, relative to its size.",
    "holds": "Whether the input satisfies the equations of its layers up to noise, and chance does not explain this.",
    "determined": "Whether no other input satisfies the same equations.",
    "share": "How much of the gradient this input explains, relative to the size of the gradient.",
    "noise_error": "The stated error that follows from the noise of the gradient alone.",
    "zeros": "Number of neurons that receive no gradient from this input.",
    "chance": "Bound on the probability that a wrong input passes this test by chance.",
    "agreeing": "Number of neurons where activation and gradient agree clearly.",
    "moved": "Number of inactive neurons that have a gradient nevertheless, which local training explains.",
    "hidden": "Number of active neurons whose gradient is zero.",
    "allowed": "Number of such hidden neurons that noise explains.",
    "entangled": "How far this input can move towards another one without a contradiction.",
    "forward": "How far the output of the layer lies outside of what the next layer received, relative to its size.",
    "forward_noise": "Value of forward that noise explains.",
    "backward": "How far the gradient signal lies outside of what the next layer sent back, relative to its size.",
    "backward_noise": "Value of backward that noise explains.",
    "gap": "Value of forward for the next best solution. A large gap means that the solution is unique.",
    "twin": "Number of neurons in which the most similar other input differs.",
    "outside": "Largest violation of an equation of the network, relative to the size of its terms.",
    "excess": "Largest violation of an equation, divided by its noise.",
    "equations": "Number of equations that the features give for the pixels of this input.",
    "feature_residual": "Difference between the recovered features and those of this input, relative to their size.",
}
"""Numbers of the evidence for an input. The key is the name in ``report.json``."""


def anchor(term: str) -> str:
    """Return the identifier of a term on the page.

    >>> anchor("one sample or a mean"), anchor("ε (epsilon)")
    ('term-one-sample-or-a-mean', 'term-ε-(epsilon)')
    """
    return "term-" + "-".join(term.split())


def glossary(used: Collection[str]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the groups of the glossary: a title, and for each term its anchor, its name and its explanation.

    Args:
        used: Claims and numbers that the page shows. Other claims and numbers are left out.
    """
    shown = {
        "Terms": GENERAL,
        "Claims": {str(kind): text for kind, text in CLAIMS.items() if kind in used},
        "Numbers of the evidence": {name: text for name, text in NUMBERS.items() if name in used},
    }
    return [
        (title, [(anchor(term), term, text) for term, text in terms.items()]) for title, terms in shown.items() if terms
    ]


def explained(term: str) -> str | None:
    """Return the anchor of a term, or None if the glossary does not contain it."""
    return anchor(term) if term in GENERAL or term in NUMBERS or term in {str(kind) for kind in CLAIMS} else None
