"""What an audit claims about each recovered input, and the rule that decides the claim.

The gradient of a layer cannot distinguish samples that activate the same neurons and have proportional gradients at the
layer's output. Such samples are merged: they are recovered as their weighted mean, and no attack on this layer can
separate them. Replaying an input alone through the model (``spearpp.auditing.signals``) shows how many samples the
input represents. The rule is the same for every search:

1. An input belongs to the batch if the certificate of the layer says so, or if the mismatch of the input's replay is
   too small to be chance. The stated error is the larger of the error that the noise implies and the error that the
   mismatch implies.
2. The contribution κ of the input shows whether the input represents one sample or k samples. κ is compared with the
   contributions of the other inputs, or with 1/N if the number N of the client's samples is known.
3. If N is unknown, every input could represent the same number of merged samples. Samples that are merged in this way
   are at most δ = √(noise / curvature) away from their mean, relative to their norm, and the claim states δ (with a
   safety factor).
4. If the loss is unknown, inputs are single samples only if N inputs were found, each with its own activation pattern.
   Otherwise an input is one sample or a weighted mean. Such an input counts as recovered if its activation pattern
   clearly differs from all others.
5. If the replays of other inputs prove the loss, an input whose replay fails is not recovered.
6. If only the bias gradient shows the length of an input, the input is not recovered if its replay contradicts it
   (``_length_contradicted``).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from spearpp.auditing.signals import MATCHED_UP_TO, Signals
from spearpp.auditing.task import Task
from spearpp.inversion.evidence import EXACT, Scope, pattern_distances
from spearpp.inversion.evidence.spread import row_deviation
from spearpp.inversion.result import Inversion
from spearpp.inversion.tolerance import RARE
from spearpp.model import Layer
from spearpp.model.loss import Loss
from spearpp.model.operations import DROPOUT
from spearpp.types import Bool, Float, Tensor, select_rows, to_device
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

MAX_UNREPLAYED_ERROR = 0.5
"""Largest stated relative error of an input that its own replay does not prove, but the certificate of the layer or the
replay of the whole batch. A design choice: an input with a larger error shows little of its sample. If noise dominates,
0.5 is four standard deviations, and the expected error is an eighth of the norm."""
MAX_ERROR = 0.1
"""Largest stated relative error of an input that its own replay proves (see ``MAX_UNREPLAYED_ERROR`` for others). A
design choice: a person recognises an image whose error is a tenth of its norm."""
MAX_MISMATCH = 1e-2
"""Largest mismatch of an input that its replay explains. A design choice between two cases that are far apart: the
mismatch of a right input is at the level of the noise, and the mismatch of a wrong input is 0.5 or more."""
MAX_MISMATCH_RATIO = 10.0
"""A replay contradicts the length of an input if the mismatch is more than this many times what noise and the stated
error of the input explain. A design choice: noise does not cause ten times its own size."""
SAFETY_FACTOR = 3.0
"""The stated error is this many times the error that the mismatch and its slope (``Signals.slope``) imply. Measured:
on contrast copies (an image and the same image with another contrast) the implied error was within a factor of 1.3 of
the true error. With a factor of 2 the true error of four inputs exceeded three times the stated error
(``docs/results/hostile.md``)."""
MIN_PATTERN_SHARE = 0.03
"""Smallest share of the neurons in which the activation pattern of an input must differ from every other pattern. A
design choice: ``benchmarks/hostile.py`` counts samples as merged if their patterns differ in at most 2 % of the
neurons, and the claims must be stricter than this benchmark."""
MIN_PATTERN_NEURONS = 3
"""Smallest number of neurons in which two activation patterns must differ. Derived: mixtures of two samples whose
patterns differ in at most two neurons solve the equations of both samples (``docs/method.md``)."""
SAME_CONTRIBUTION = 0.05
"""Largest relative difference between two contributions that count as equal. A design choice: 5 % is far below the
factor of 2 between the contributions of one sample and of two merged samples."""
MIN_VISIBLE = 0.75
"""Smallest share of the samples that the gradient must show before an input can be proved to be one sample. A client
may weight samples that are nearly equal, for example by 1/2 for two records of the same person. Each of their means
then contributes as much as one sample, but the gradient shows fewer samples. Measured: 95 to 99 % of the samples are
visible in trained networks (``docs/results/equations.md``)."""
WHOLE_NUMBER = 0.1
"""Largest distance from a whole number at which a contribution still counts samples. A design choice: 0.1 is far below
0.5, the largest possible distance from a whole number."""
_MAY_BE_MEAN = "the input may be the mean of several samples"
_CONTRADICTED_LENGTH = (
    "its replay does not reproduce its part of the update: the client has another network or loss (state them), or it "
    "changed the gradients of weights and biases separately"
)
_REPLAYED = "the gradient of this input alone matches its part of the update"


class ClaimKind(StrEnum):
    """What is known about a recovered input, strongest claim first."""

    ONE = "one sample"
    """The input is one training sample, exact up to the stated error."""
    ONE_OR_MEAN = "one sample or a mean"
    """The input is one training sample, or the weighted mean of several samples that this update cannot distinguish.
    The weights sum to 1. In a network with one or two outputs some of them can be negative."""
    APPROXIMATE = "approximate"
    """The input is one training sample or such a weighted mean, with a stated error above ``EXACT``: of at most 10 % if
    the replay of this input proves it, and of at most 50 % if other evidence does."""
    SEVERAL = "several samples"
    """The input contributes as much as k samples: it is their weighted mean, or one sample that occurs k times."""
    FITS = "fits"
    """The input fits the gradient, but the evidence does not prove that the input is a sample."""
    NONE = "nothing"
    """Nothing is claimed about the input."""


@dataclass(frozen=True)
class Claim:
    """What is claimed about one recovered input."""

    kind: ClaimKind
    error: float
    """The stated error: an estimate of the distance between the input and what the claim says it is, relative to the
    norm. inf if no error is stated. It is not a bound: in tests with hostile clients the true distance was at most
    three times as large (``docs/limits.md``)."""
    samples: float
    """How many samples of the batch the input represents. nan if this number is unknown."""
    why: str
    """The reason for the claim, or the reason why the claim is not stronger. A clause without a full stop."""
    apart: float = float("inf")
    """If the input is a mean: how far its samples can be from this mean, relative to its norm. 0 if the input is one
    sample, inf if the distance is unknown."""

    @classmethod
    def fitting(cls, why: str, samples: float = float("nan")) -> "Claim":
        """Return the claim for an input that fits the gradient and is not proved to be a sample."""
        return cls(ClaimKind.FITS, float("inf"), samples, why)

    @classmethod
    def nothing(cls, why: str) -> "Claim":
        """Return the claim for an input about which nothing is known."""
        return cls(ClaimKind.NONE, float("inf"), float("nan"), why)

    @property
    def certified(self) -> bool:
        """Whether the input is exact: one sample, or a mean of samples that cannot be distinguished.

        ``Inversion.certified`` says this from the evidence of the inversion alone, before any replay.
        """
        return self.kind in (ClaimKind.ONE, ClaimKind.ONE_OR_MEAN)

    @property
    def recovered(self) -> bool:
        """Whether the input counts as recovered."""
        return self.certified or self.kind is ClaimKind.APPROXIMATE


UNJUDGED = Claim.nothing("the input was not judged, because the audit was interrupted")
"""The claim for an input if the audit stopped before it judged the input."""


def reasons(claims: Sequence[Claim], *kinds: ClaimKind) -> str:
    """Return the most frequent reason of the claims of these kinds, or an empty string if there is no such claim."""
    found = Counter(each.why for each in claims if each.kind in kinds)
    return found.most_common(1)[0][0] if found else ""


@dataclass(frozen=True)
class Known:
    """What the audit knows in addition to the recovered inputs."""

    batch_size: int | None
    """N, the number of samples that the client trained on. None if unknown."""
    absolute: bool = True
    """Whether the update has the scale of a mean loss: a gradient, or weights with a known learning rate."""
    one_step: bool = True
    """Whether the update is a single gradient and not the result of several local steps. An audit always says which;
    ``invert``, which knows less, allows for local steps unless it is told that there were none."""
    one_row_each: bool = True
    """Whether the layer sees the inputs of the model, with one row for each sample."""
    dropout: bool = False
    """Whether Dropout follows the layer. A replay cannot be exact then."""
    outputs: int = 0
    """Number of outputs of the network. 0 if unknown."""
    relu: bool = False
    """Whether the model says that a ReLU follows the layer."""
    zero_bias: bool = False
    """Whether all biases of the layer are zero. Activation patterns do not depend on the length of an input then."""
    refuted: bool = False
    """Whether there is no model, and no common network reproduces the update from an input."""
    repeatable: bool = True
    """Whether the model computes the same for a sample alone as in the client's batch: no Dropout and no BatchNorm."""

    @classmethod
    def about(cls, layer: Layer, update: ClientUpdate, task: Task) -> "Known":
        """Return what an audit knows about a layer.

        The update has the scale of the loss if it is a gradient, or weights after one step with a known lr. The mean
        squared error is scaled in several ways (a mean or a sum over the outputs, a factor of 1/2), so its size does
        not count samples. The last matrix of the update counts as the output layer.
        """
        one_known_step = update.steps in (None, 1) and update.lr is not None
        scaled = update.clients == 1 and (update.kind == "gradients" or one_known_step)
        matrices = [spec.shape for spec in tensor_specs(update.weights).values() if spec.ndim == 2]
        modules = [] if task.model is None else list(task.model.modules())
        return cls(
            task.batch_size,
            absolute=scaled and task.loss is not Loss.MSE,
            one_step=update.one_gradient,
            one_row_each=layer.sees == "inputs",
            dropout=layer.dropout,
            outputs=matrices[-1][0] if matrices else 0,
            relu=not layer.equations and not layer.assumed,
            zero_bias=layer.bias is not None and not bool(update.weights[layer.bias].any()),
            repeatable=not any(isinstance(each, (*DROPOUT, _BatchNorm)) for each in modules),
        )


@dataclass(frozen=True)
class OneSample:
    """How much one sample contributes to the update."""

    why: str
    """The reason for ``contribution`` and ``implied``. A clause without a full stop."""
    contribution: float | None = None
    """κ of one sample. None if the contributions of the inputs do not determine it."""
    implied: float = float("nan")
    """The number of samples in the batch that κ implies. nan if κ implies no number."""
    counted: bool = False
    """Whether the caller gave the number of samples. Only then can an input be proved to be one sample."""
    merged: bool = False
    """Whether most inputs must represent several samples."""


def claims_of(
    inversion: Inversion, patterns: Bool[Tensor, "k m"], signals: Signals | None, known: Known
) -> tuple[Claim, ...]:
    """Return one claim for each recovered input.

    Args:
        inversion: the result of inverting the gradient of the layer.
        patterns: which neurons each input activates.
        signals: the replay of each input alone. None if the model or the loss does not allow a replay.
        known: what else the audit knows.
    """
    layers = _layer_evidence(inversion, patterns, known)
    consistent = torch.tensor([each.consistent for each in layers], dtype=torch.bool)
    explained = torch.zeros(len(layers), dtype=torch.bool)
    one = OneSample("the loss is unknown, or the model cannot be replayed")
    if signals is not None:
        signals = to_device(signals, torch.device("cpu"))
        if bool(_proves_loss(signals).any()):  # rule 1: the replays whose mismatch is no chance
            explained[: len(signals.mismatch)] = _beyond_chance(signals)
            if layers[0].from_network:  # its directions were computed from the replay, which then proves nothing more
                explained &= consistent
            found = signals.contribution[explained[: len(signals.mismatch)]]
            one = one_sample(found, inversion.batch_size, known)  # rule 2
    length_contradicted = _length_contradicted(inversion, patterns, signals, known) & ~explained
    loss_known = int(explained.sum()) >= max(2, int((consistent & ~explained).sum()))
    unproved = "noise, missing samples or too few neurons leave too little evidence to prove the input"
    if known.dropout:
        unproved = "Dropout removes too many of the neurons that could prove the input"
    no_single = f"no single sample makes the same contribution to the gradient, so {_MAY_BE_MEAN}"
    claims = []
    for row, layer in enumerate(layers):
        if bool(explained[row]) and signals is not None:  # rules 1 to 3
            claims.append(_explained(select_rows(signals, torch.tensor([row])), layer, one, known))
        elif layer.consistent and bool(length_contradicted[row]):
            claims.append(Claim.fitting(_CONTRADICTED_LENGTH))
        elif layer.consistent and loss_known and known.one_step and not known.dropout:  # rule 5
            claims.append(Claim.fitting(no_single))
        elif layer.consistent:  # rule 4
            claims.append(_claimed_by_layer(layer, known))
        elif bool(inversion.fits[row]):
            claims.append(Claim.fitting(unproved))
        else:
            claims.append(Claim.nothing("the input alone does not fit the gradient"))
    return tuple(claims)


def _length_contradicted(
    inversion: Inversion, patterns: Bool[Tensor, "k m"], signals: Signals | None, known: Known
) -> Bool[Tensor, "k"]:
    """Return which inputs have a length that the network contradicts.

    The bias gradient determines the length of an input. An optimiser that scales the tensors of a layer separately
    changes this length, and the gradient keeps its rank. Several samples whose activation patterns depend on biases
    show a wrong length themselves. A single sample does not, nor do samples of a layer with biases of zero. Their
    replay must then agree with the update: for any loss if it can show the length, otherwise for the stated loss.
    Without a model, the replay through one of the common networks must agree if the weights can be those of one.
    """
    found = torch.zeros(len(inversion.inputs), dtype=torch.bool)
    single = inversion.batch_size == 1
    if not known.one_step or not (single or known.zero_bias):
        return found
    if known.refuted:
        return ~found
    if signals is not None and known.repeatable:
        differs = signals.mismatch if known.zero_bias and bool(signals.mismatch.isfinite().any()) else signals.outside
        explained = signals.noise
        if inversion.evidence is not None:
            explained = explained + signals.slope[:, 0] * inversion.evidence.error.cpu()[: len(differs)]
        found[: len(differs)] = differs > (MAX_MISMATCH_RATIO * explained).clamp_min(MATCHED_UP_TO)
    if single and known.relu and inversion.factors is not None:
        active = inversion.factors.live.cpu()
        found |= (active & ~patterns.cpu()).sum(1) >= MIN_PATTERN_NEURONS
    return found


def patterns_of(layer: Layer, inputs: Float[Tensor, "k n"], update: ClientUpdate) -> Bool[Tensor, "k m"]:
    """Return which neurons of the layer each input activates."""
    weight = update.weights[layer.weight]
    z = inputs.to(weight.device).double() @ weight.double().T
    return z + (0.0 if layer.bias is None else update.weights[layer.bias].double()) > 0


@dataclass(frozen=True)
class _LayerEvidence:
    """What the gradient of the layer says about one input, without a replay."""

    consistent: bool
    """Whether the certificate says that the input belongs to the batch, up to its stated error."""
    error: float
    """The relative error that the noise of the gradient implies."""
    entries: float
    """The part of this error that comes from noise in the entries of the input. A replay does not show this part,
    because the signal hardly depends on it."""
    different: bool
    """Whether the activation pattern of the input clearly differs from all others."""
    from_network: bool
    """Whether the evidence comes from the equations of the whole network."""
    complete: bool
    """Whether the audit found as many inputs as the client has samples, each with its own activation pattern. No input
    represents two samples then."""


def _layer_evidence(inversion: Inversion, patterns: Bool[Tensor, "k m"], known: Known) -> list[_LayerEvidence]:
    """Return what the gradient of the layer says about each input."""
    evidence, rows = inversion.evidence, len(inversion.inputs)
    noise = torch.full((rows,), torch.inf, dtype=torch.float64) if evidence is None else evidence.error.double().cpu()
    consistent = torch.zeros(rows, dtype=torch.bool) if evidence is None else evidence.consistent.cpu()
    distances = _distances_to_nearest(patterns.cpu())
    entries = _noise_of_entries(inversion)
    different = distances >= max(MIN_PATTERN_NEURONS, MIN_PATTERN_SHARE * patterns.shape[1])
    own_pattern = rows == 1 or bool((distances >= MIN_PATTERN_NEURONS).all())
    all_found = known.batch_size == inversion.batch_size == rows and bool(consistent.all()) and known.one_row_each
    # Activation patterns say nothing about samples before other activations than ReLU.
    from_network = evidence is not None and evidence.scope is Scope.NETWORK
    complete = all_found and own_pattern and not from_network
    return [
        _LayerEvidence(
            bool(consistent[row]), float(noise[row]), entries[row], bool(different[row]), from_network, complete
        )
        for row in range(rows)
    ]


def _noise_of_entries(inversion: Inversion) -> list[float]:
    """Return the norm of the noise in the entries of each input, relative to the norm of the input."""
    inputs, factors = inversion.inputs.double(), inversion.factors
    if factors is None:
        return [0.0] * len(inputs)
    norms = torch.linalg.vector_norm(inputs, dim=1).clamp_min(1e-300)
    columns = factors.rows.shape[1]
    if columns > inputs.shape[1]:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    points = inputs.to(factors.rows) @ factors.rows.T
    return (row_deviation(factors, points).to(norms) * columns**0.5 / norms).tolist()


def _beyond_chance(signals: Signals) -> Bool[Tensor, "k"]:
    """Return which inputs have a mismatch that is small and that chance does not explain.

    A random vector matches to within the mismatch with a probability of about mismatch^(extra equations).
    """
    digits = -signals.mismatch.log10() * signals.extra_equations
    return (signals.mismatch <= MAX_MISMATCH) & (digits >= -math.log10(RARE))


def _proves_loss(signals: Signals) -> Bool[Tensor, "k"]:
    """Return which inputs prove that the replay used the right loss. A wrong loss would leave a larger mismatch."""
    slope = signals.slope.amax(1).clamp_min(1e-300)
    return _beyond_chance(signals) & (SAFETY_FACTOR * signals.mismatch / slope <= MAX_ERROR)


def _explained(signal: Signals, layer: _LayerEvidence, one: OneSample, known: Known) -> Claim:
    """Return the claim for an input that its replay explains. ``signal`` has only the row of this input."""
    mismatch, floor = float(signal.mismatch), float(signal.noise)
    if one.merged and not layer.complete:
        return Claim.fitting(f"{one.why}, so {_MAY_BE_MEAN}")
    samples = 1.0 if layer.complete else float("nan")
    column = 0  # of slope and curvature: 0 for the direction of the signal, 1 with its size
    if one.contribution is not None and not layer.complete:
        samples = float(signal.contribution) / one.contribution
        count = round(samples)
        if abs(samples - count) > WHOLE_NUMBER * max(count, 1) or count == 0:
            why = f"the input contributes to the gradient as much as {samples:.3g} samples, so {_MAY_BE_MEAN}"
            return Claim.fitting(why, samples)
        if count > 1:
            why = f"the input is the weighted mean of {count} samples, or one sample that occurs {count} times"
            return Claim(ClaimKind.SEVERAL, float("inf"), samples, why)
        if not math.isnan(one.implied):  # the scale is known, so the size of the contribution must match too
            mismatch, column = max(mismatch, abs(samples - 1)), 1
    if layer.consistent and not known.one_step and (layer.different or layer.complete):
        # Local steps cause a mismatch that is no error of the input.
        return replace(_claimed_by_layer(layer, known), samples=samples)
    error = SAFETY_FACTOR * max(mismatch, floor) / max(float(signal.slope[0, column]), 1e-300)
    error = max(error, layer.error) if layer.consistent else error + layer.entries
    counted = one.counted or layer.complete
    apart = 0.0 if counted else (SAFETY_FACTOR * floor / max(float(signal.curvature[0, column]), 1e-300)) ** 0.5
    if max(error, apart) > MAX_ERROR:
        if layer.consistent and layer.different:
            return replace(_claimed_by_layer(layer, known), samples=samples)
        return Claim.fitting(
            f"the contribution to the gradient hardly depends on the input, so {_MAY_BE_MEAN}", samples
        )
    mean = f"one training sample, or the mean of samples that differ from it by at most {apart:.1%}"
    if error > EXACT:
        why = f"approximately {'one training sample' if counted else mean}; {_REPLAYED}; {one.why}"
        return Claim(ClaimKind.APPROXIMATE, max(error, apart), samples, why, apart)
    if counted and known.one_step:
        return Claim(ClaimKind.ONE, error, samples, f"one training sample; {_REPLAYED}; {one.why}", 0.0)
    what = "one training sample, averaged over the local steps" if counted else mean
    return Claim(ClaimKind.ONE_OR_MEAN, error, samples, f"{what}; {_REPLAYED}; {one.why}", apart)


def _claimed_by_layer(layer: _LayerEvidence, known: Known) -> Claim:
    """Return the claim that the evidence of the layer supports, without using the replay."""
    if layer.error > MAX_UNREPLAYED_ERROR:
        return Claim.fitting("the noise of the gradient leaves the input too uncertain")
    exact = layer.error <= EXACT
    approximately = "" if exact else "approximately "
    if layer.complete:
        count = "the audit found one input, and the client trained on one sample"
        if known.batch_size != 1:
            count = f"the audit found {known.batch_size} inputs with different activation patterns, "
            count += f"and the client trained on {known.batch_size} samples"
        if known.one_step:
            why = f"{approximately}one training sample; {count}"
            return Claim(ClaimKind.ONE if exact else ClaimKind.APPROXIMATE, layer.error, 1.0, why, 0.0)
        why = f"{approximately}one training sample, averaged over the local steps; {count}"
        return Claim(ClaimKind.ONE_OR_MEAN if exact else ClaimKind.APPROXIMATE, layer.error, 1.0, why)
    if not layer.different:
        return Claim.fitting(f"{_MAY_BE_MEAN}, and the gradient of this layer does not show how many")
    alike = "are almost equal or activate the same neurons" if layer.from_network else "activate the same neurons"
    why = f"{approximately}one training sample, or the weighted mean of several samples that {alike}"
    if 1 <= known.outputs <= 2:  # all signals at the outputs are multiples of one vector, with either sign
        why += " (weights of samples with opposite errors are negative)"
    return Claim(ClaimKind.ONE_OR_MEAN if exact else ClaimKind.APPROXIMATE, layer.error, float("nan"), why)


def _distances_to_nearest(patterns: Bool[Tensor, "k m"]) -> Float[Tensor, "k"]:
    """Return in how many neurons each activation pattern differs from the nearest other one; 0 for a single pattern."""
    if len(patterns) < 2:
        return torch.zeros(len(patterns), dtype=torch.float64)
    return pattern_distances(patterns).fill_diagonal_(torch.inf).amin(1)


def one_sample(found: Float[Tensor, "k"], rank: int, known: Known) -> OneSample:
    """Return how much one sample contributes, given the contributions of all inputs that their replay explains.

    Args:
        found: κ of each input that its replay explains.
        rank: the rank of the gradient, a lower bound on the number of samples.
        known: what else the audit knows.

    >>> import torch
    >>> one_sample(torch.tensor([0.1, 0.1, 0.1, 0.2]), rank=4, known=Known(batch_size=None)).implied
    10.0
    """
    if not len(found):
        return OneSample("the replay of no input matches its part of the update")
    given = known.batch_size
    if given is not None and known.absolute:
        each = round(float(found.median()) * given)  # 1 if most inputs are single samples, k if most represent k
        alike = (found * given / max(each, 1) - 1).abs() <= WHOLE_NUMBER
        if each >= 1 and 2 * int(alike.sum()) >= len(found) and each * len(found) <= (1 + WHOLE_NUMBER) * given:
            counted = rank >= MIN_VISIBLE * given
            why = f"the client trained on {_samples(given)}"
            why += "" if counted else f", but its gradient shows only {rank}"
            return OneSample(why, 1 / given, float(given), counted)
    alike = (found[:, None] / found[None] - 1).abs() <= SAME_CONTRIBUTION
    counts = alike.sum(1)
    most = int(counts.max())
    if 2 * most < len(found) or (most == 1 and len(found) > 1):
        why = "the samples contribute differently to the update, for example because of clipping or class weights"
        return OneSample(why)
    one = float(found[counts == most].min())
    one = float(found[(found / one - 1).abs() <= SAME_CONTRIBUTION].median())
    if not known.absolute or given is not None:
        return OneSample("the scale of the update is unknown", one)
    implied = round(1 / one)
    if known.one_step and 1 / one < rank - WHOLE_NUMBER and abs(1 / one - 1) > WHOLE_NUMBER:  # 1: a sum of losses
        why = f"the size of the contributions implies {1 / one:.3g} samples, but the gradient has rank {rank}"
        return OneSample(why, merged=True)
    if abs(1 / one - implied) > WHOLE_NUMBER or implied < rank:
        return OneSample("the update does not have the scale of a mean loss", one)
    why = f"the size of the contributions to the gradient implies {_samples(implied)}"
    return OneSample(why, 1 / implied, float(implied))


def _samples(count: int) -> str:
    return "one sample" if count == 1 else f"{count} samples"
