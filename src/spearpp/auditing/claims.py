"""What an audit claims of each recovered input, and the one rule behind it.

The gradient of a layer determines an input up to merging: samples that activate the same neurons and have proportional
signals are recovered as their weighted mean, and no attack on this layer can tell them apart. Replaying the input alone
(``spearpp.auditing.signals``) tells how many samples it stands for. The rule, for every search:

1. An input is in the batch if the layer's certificate says so, or if its replay has a mismatch that chance does not
   explain. Its error is the larger of what the noise implies and what the mismatch implies.
2. Its weight κ, against that of the other inputs or against 1/N where the number N of the client's samples is known,
   says whether it stands for one sample or for k.
3. If N is not known, all inputs could stand for the same number of samples each. Samples that are merged like this lie
   within √(noise / bend) of each other, and the claim says so.
4. Where the loss is not known, inputs are single samples if N of them were found, each with a pattern of its own.
   Otherwise an input is one sample or a weighted mean; it counts as recovered if its activation pattern is clearly
   different from all others.
5. Where the loss is known because other inputs prove it, an input that no single sample explains is not recovered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from spearpp.auditing.signals import Signals
from spearpp.inversion.evidence import EXACT
from spearpp.inversion.result import Inversion
from spearpp.types import Bool, Float, Tensor, select_rows, to_device

RECOGNISABLE = 0.1
"""Largest stated error of an input that counts as recovered."""
EXPLAINED = 1e-2
"""Largest mismatch of an input that its replay explains."""
RARE = 9
"""An agreement by chance must be rarer than ten to the minus this."""
SAFETY = 3.0
"""The stated error is this many times what mismatch and median slope imply. They implied the true error within 1.3 on
contrast copies (``docs/results/hostile.md``)."""
SAME_WEIGHT = 0.05
"""Relative difference up to which two weights are equal."""
WHOLE = 0.1
"""Distance from a whole number up to which a weight counts samples."""
DIFFERENT, FEWEST = 0.03, 3
"""Share of the neurons in which the activation pattern of an input must differ from all others, and their number."""


class Kind(StrEnum):
    """What is known of a recovered input, strongest first."""

    ONE = "one sample"
    """One training sample, exact up to the stated error."""
    ONE_OR_MEAN = "one sample or a mean"
    """One training sample, or the weighted mean of several that activate the same neurons."""
    APPROXIMATE = "approximate"
    """The same, with an error that is stated and not negligible."""
    SEVERAL = "several samples"
    """It has the signal of k samples: their weighted mean, or one sample k times."""
    FITS = "fits"
    """It fits the gradient; the evidence is not enough to call it a sample."""
    NONE = "nothing"
    """Nothing is claimed."""


@dataclass(frozen=True)
class Claim:
    """What is claimed of one recovered input."""

    kind: Kind
    error: float
    """Bound on the distance to what is claimed, over its norm; inf where none can be stated."""
    samples: float
    """How many samples of the batch it stands for; nan where that is not known."""
    why: str
    """What the claim rests on, or why no more is claimed, in a sentence."""
    apart: float = float("inf")
    """If it is a mean: how far apart its samples may be, over their norm; 0 if it is one sample, inf if not known."""

    @property
    def certified(self) -> bool:
        """Whether it is exact: one sample, or a mean of samples that cannot be told apart."""
        return self.kind in (Kind.ONE, Kind.ONE_OR_MEAN)

    @property
    def recovered(self) -> bool:
        """Whether it counts as a recovered input."""
        return self.certified or self.kind is Kind.APPROXIMATE


UNJUDGED = Claim(Kind.NONE, float("inf"), float("nan"), "it was not judged: the audit was interrupted")


@dataclass(frozen=True)
class Known:
    """What the audit knows besides the recovered inputs."""

    batch_size: int | None
    """N, the number of samples the client trained on, if that is known."""
    absolute: bool = True
    """Whether the update has the scale of a mean loss: a gradient, or weights with a known learning rate."""
    one_step: bool = True
    """Whether the update is one gradient, and not that of several local steps."""
    one_row_each: bool = True
    """Whether the layer is fed one row for each sample, and not for each token."""
    dropout: bool = False
    """Whether Dropout follows the layer, so that a replay cannot be exact."""


@dataclass(frozen=True)
class Weights:
    """How much one sample weighs in the update."""

    one: float | None
    """κ of one sample; None if the weights do not tell."""
    implied: float
    """How many samples the batch has by that; nan if it cannot be told."""
    why: str
    """What is known about it, in words."""
    counted: bool = False
    """Whether the number of samples is known from outside, so that an input can be proved to be one."""
    merged: bool = False
    """Whether most inputs must stand for several samples."""


def judge(
    inversion: Inversion, patterns: Bool[Tensor, "k m"], signals: Signals | None, known: Known
) -> tuple[Claim, ...]:
    """The claim for each recovered input.

    Args:
        inversion: what the layer's gradient gave.
        patterns: which neurons each input activates.
        signals: each input replayed alone, where the model and the loss allow it.
        known: what else is known.
    """
    evidence = inversion.certificates
    rows = len(inversion.inputs)
    noise = torch.full((rows,), torch.inf, dtype=torch.float64) if evidence is None else evidence.error.double().cpu()
    held = torch.zeros(rows, dtype=torch.bool) if evidence is None else evidence.consistent.cpu()
    apart = _distances(patterns.cpu())
    different = apart >= max(FEWEST, DIFFERENT * patterns.shape[1])
    rank = inversion.batch_size
    own_pattern = rows == 1 or bool((apart >= FEWEST).all())
    complete = known.batch_size == rank == rows and bool(held.all()) and own_pattern and known.one_row_each
    signals = None if signals is None else to_device(signals, torch.device("cpu"))
    explained = torch.zeros(rows, dtype=torch.bool)
    weights = Weights(None, float("nan"), "the loss is not known, or the model cannot be replayed")
    if signals is not None and bool(_proves_loss(signals).any()):
        explained[: len(signals.mismatch)] = _beyond_chance(signals)
        weights = weigh(signals.weight[explained[: len(signals.mismatch)]], rank, known)
    loss_known = int(explained.sum()) >= max(2, int((held & ~explained).sum()))
    claims = []
    for row in range(rows):
        layer = _LayerEvidence(bool(held[row]), float(noise[row]), bool(different[row]), complete)
        if bool(explained[row]) and signals is not None:
            claims.append(_explained(select_rows(signals, torch.tensor([row])), layer, weights, known))
        elif layer.held and loss_known and known.one_step and not known.dropout:
            why = "no single sample has its signal: several samples may be merged in it"
            claims.append(Claim(Kind.FITS, float("inf"), float("nan"), why))
        elif layer.held:
            claims.append(_held(layer, known))
        elif bool(inversion.fits[row]):
            claims.append(Claim(Kind.FITS, float("inf"), float("nan"), _not_certified(known)))
        else:
            claims.append(Claim(Kind.NONE, float("inf"), float("nan"), "it does not fit the gradient by itself"))
    return tuple(claims)


@dataclass(frozen=True)
class _LayerEvidence:
    """What the layer alone says about an input."""

    held: bool
    """Whether its certificate says that it is in the batch."""
    error: float
    """What noise implies."""
    different: bool
    """Whether its activation pattern is clearly different from all others."""
    complete: bool
    """Whether as many inputs were found as the client has samples, each with an activation pattern of its own. Then
    none of them stands for two samples."""


def _beyond_chance(signals: Signals) -> Bool[Tensor, "k"]:
    """Which inputs have a mismatch that is small enough and not explained by chance."""
    return (signals.mismatch <= EXPLAINED) & (-signals.mismatch.log10() * signals.spare >= RARE)


def _proves_loss(signals: Signals) -> Bool[Tensor, "k"]:
    """Which inputs prove that the loss is the one they were replayed with: another would leave a larger mismatch."""
    slope = signals.slope.amax(1).clamp_min(1e-300)
    return _beyond_chance(signals) & (SAFETY * signals.mismatch / slope <= RECOGNISABLE)


def weigh(weights: Float[Tensor, "k"], rank: int, known: Known) -> Weights:
    """How much one sample weighs, from the weights of all inputs that their replay explains.

    >>> import torch
    >>> weigh(torch.tensor([0.1, 0.1, 0.1, 0.2]), rank=4, known=Known(batch_size=None)).implied
    10.0
    """
    if not len(weights):
        return Weights(None, float("nan"), "no input's signal is explained by replaying it alone")
    given = known.batch_size
    if given is not None and known.absolute:
        each = round(float(weights.median()) * given)  # 1 if most inputs are single samples, k if most stand for k
        alike = (weights * given / max(each, 1) - 1).abs() <= WHOLE
        if each >= 1 and 2 * int(alike.sum()) >= len(weights) and each * len(weights) <= (1 + WHOLE) * given:
            return Weights(1 / given, float(given), f"the client has {given} samples", True)
    alike = (weights[:, None] / weights[None] - 1).abs() <= SAME_WEIGHT
    counts = alike.sum(1)
    most = int(counts.max())
    if 2 * most < len(weights) or (most == 1 and len(weights) > 1):
        return Weights(None, float("nan"), "samples weigh unequally, as clipping and class weights make them")
    one = float(weights[counts == most].min())
    one = float(weights[(weights / one - 1).abs() <= SAME_WEIGHT].median())
    if not known.absolute or given is not None:
        return Weights(one, float("nan"), "the scale of the update is not known")
    implied = round(1 / one)
    if known.one_step and 1 / one < rank - WHOLE and abs(1 / one - 1) > WHOLE:  # 1 is the weight of a sum of losses
        why = f"the size of the signals implies {1 / one:.3g} samples, the gradient shows at least {rank}"
        return Weights(None, float("nan"), why, merged=True)
    if abs(1 / one - implied) > WHOLE or implied < rank:
        return Weights(one, float("nan"), "the scale of the update is not that of a mean loss")
    return Weights(1 / implied, float(implied), f"the size of the signals implies {implied} samples")


def _explained(signal: Signals, layer: _LayerEvidence, weights: Weights, known: Known) -> Claim:
    """The claim for an input that its replay explains; ``signal`` has its row alone."""
    mismatch, floor = float(signal.mismatch), float(signal.noise)
    if weights.merged and not layer.complete:
        return Claim(Kind.FITS, float("inf"), float("nan"), f"{weights.why}: several samples may be merged in it")
    samples, sized = 1.0 if layer.complete else float("nan"), 0
    if weights.one is not None and not layer.complete:
        samples = float(signal.weight) / weights.one
        count = round(samples)
        if abs(samples - count) > WHOLE * max(count, 1) or count == 0:
            why = f"its signal has the size of {samples:.3g} samples: several samples may be merged in it"
            return Claim(Kind.FITS, float("inf"), samples, why)
        if count > 1:
            return Claim(
                Kind.SEVERAL, float("inf"), samples, f"it stands for {count} samples, or for one {count} times"
            )
        if weights.implied == weights.implied:  # a known scale: the size of the signal must fit too
            mismatch, sized = max(mismatch, abs(samples - 1)), 1
    if layer.held and not known.one_step and (layer.different or layer.complete):
        return replace(
            _held(layer, known), samples=samples
        )  # local steps make a mismatch that is no error of the input
    error = SAFETY * max(mismatch, floor) / max(float(signal.slope[0, sized]), 1e-300)
    error = max(error, layer.error if layer.held else 0.0)
    counted = weights.counted or layer.complete
    apart = 0.0 if counted else (SAFETY * floor / max(float(signal.bend[0, sized]), 1e-300)) ** 0.5
    if max(error, apart) > RECOGNISABLE:
        if layer.held and layer.different:
            return replace(_held(layer, known), samples=samples)
        why = "its signal hardly depends on the input, so it may be the mean of several samples"
        return Claim(Kind.FITS, float("inf"), samples, why)
    if error > EXACT:
        why = f"replayed alone it explains its signal; {weights.why}"
        return Claim(Kind.APPROXIMATE, max(error, apart), samples, why, apart)
    if counted and known.one_step:
        return Claim(Kind.ONE, error, samples, f"replayed alone it has the signal of one sample; {weights.why}", 0.0)
    why = f"one sample, or the mean of samples at most {apart:.1%} apart; {weights.why}"
    return Claim(Kind.ONE_OR_MEAN, error, samples, why, apart)


def _held(layer: _LayerEvidence, known: Known) -> Claim:
    """The claim for an input that the layer certifies and that no replay explains."""
    exact = layer.error <= EXACT
    if layer.complete:
        why = f"as many inputs were found as the client has samples, {known.batch_size}, each with a pattern of its own"
        if known.one_step:
            return Claim(Kind.ONE if exact else Kind.APPROXIMATE, layer.error, 1.0, why, 0.0)
        why += "; over several local steps it is the mean of what the client trained on in its place"
        return Claim(Kind.ONE_OR_MEAN if exact else Kind.APPROXIMATE, layer.error, 1.0, why)
    if not layer.different:
        why = "it may be the mean of several samples: nothing tells how many it stands for"
        return Claim(Kind.FITS, float("inf"), float("nan"), why)
    why = "one sample, or the weighted mean of samples that activate the same neurons"
    return Claim(Kind.ONE_OR_MEAN if exact else Kind.APPROXIMATE, layer.error, float("nan"), why)


def _distances(patterns: Bool[Tensor, "k m"]) -> Float[Tensor, "k"]:
    """In how many neurons each activation pattern differs from the one most like it; 0 if there is no other."""
    if len(patterns) < 2:
        return torch.zeros(len(patterns), dtype=torch.float64)
    masks = patterns.double()
    apart = masks @ (1 - masks).T + (1 - masks) @ masks.T
    apart.fill_diagonal_(torch.inf)
    return apart.amin(1)


def _not_certified(known: Known) -> str:
    if known.dropout:
        return "not certified: Dropout hides too many of its neurons"
    return "not certified: noise, missing samples or too few neurons leave its evidence below the mark"


def reasons(claims: Sequence[Claim], *kinds: Kind) -> str:
    """Why inputs of these kinds are no more than that: the most frequent reason."""
    found = [each.why for each in claims if each.kind in kinds]
    return max(set(found), key=found.count) if found else ""
