"""From certified features to the inputs of the model, through the operations before the layer.

The gradient of a layer after convolutions yields features f = ψ(x). If a feature vector has more entries that depend
on x than x has values, ψ(x) = f determines x (``spearpp.inversion.pixels``). An input is claimed only if

1. the features are claimed (``spearpp.auditing.claims``), and x reproduces them up to their stated error,
2. the Jacobian of ψ at x has full rank, with more equations than unknowns, and
3. the replay of x alone through the whole model does not contradict the part of the update that belongs to f.

The claim about x is the claim of this replay. Its error is the larger of the error of the replay and of the error that
the equations imply. If all inputs are found, the whole update is replayed too, with all layers before this one.
"""

from dataclasses import replace

import torch
from torch import nn

from spearpp.auditing.claims import MAX_ERROR, SAFETY_FACTOR, Claim, ClaimKind, Known, claims_of, patterns_of
from spearpp.auditing.replay import as_sent
from spearpp.auditing.result import LayerAudit
from spearpp.auditing.signals import replay_alone
from spearpp.auditing.task import Task
from spearpp.errors import OptionError
from spearpp.inversion.evidence import EXACT, Evidence
from spearpp.inversion.loop import OUT_OF_TIME
from spearpp.inversion.pixels import MAX_SOLVED_RESIDUAL, Pictures, solve
from spearpp.inversion.result import Inversion
from spearpp.linalg.time_limit import OutOfTimeError, time_is_up
from spearpp.model import Sees, unwrapped
from spearpp.model.front import FrontEnd
from spearpp.types import Bool, Float, Int, Tensor, select_rows, to_device
from spearpp.update import ClientUpdate

MIN_NOISE = 1e-6
"""Smallest relative residual that a solution must reach. Derived: ten times the rounding error of float32."""
JACOBIAN_COPIES = 3
"""Matrices of the size of the Jacobian or of JᵀJ that are in memory at the same time. Derived: from the code."""


class FlatInputs(nn.Module):
    """A model that takes one flat row per sample.

    >>> net = FlatInputs(nn.Conv2d(1, 2, 3), (1, 4, 4))
    >>> net(torch.zeros(5, 16)).shape
    torch.Size([5, 2, 2, 2])
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.module = module
        self.shape = shape

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the model on inputs of its own shape."""
        outputs: Tensor = self.module(inputs.reshape(-1, *self.shape))
        return outputs


def recover_inputs(
    audits: list[LayerAudit], update: ClientUpdate, model: nn.Module, task: Task
) -> tuple[list[LayerAudit], nn.Module | None]:
    """Compute the inputs of the model from the features of one layer, if they determine the inputs.

    Args:
        audits: the layers with their claims.
        update: what the client sent.
        model: the network.
        task: what the caller asks for.

    Returns:
        The layers, and the model for the replay of the recovered inputs. The reason of a layer with features says why
        no input follows; the model is then None. If inputs follow, there is one more layer, which sees
        ``Sees.INPUTS_FROM_FEATURES``.
    """
    done = any(each.layer.sees == Sees.INPUTS and len(each.inputs) == each.batch_size for each in audits)
    order = sorted(range(len(audits)), key=lambda index: -len(audits[index].inputs))
    audits = list(audits)
    for index in order if not done else []:
        each = audits[index]
        if each.layer.sees != Sees.FEATURES or each.layer.tokens or not len(each.inputs):
            continue
        try:
            entry, network = _from_features(each, update, model, task)
            return [*audits, entry], network
        except OptionError as error:
            audits[index] = replace(each, reason=f"{each.reason}; the input of the model does not follow: {error}")
    return audits, None


def _from_features(
    audited: LayerAudit, update: ClientUpdate, model: nn.Module, task: Task
) -> tuple[LayerAudit, FlatInputs]:
    """Return the entry of the inputs that follow from the features of one layer, and the model that takes them.

    Raises:
        OptionError: if no input follows; the message says why.
    """
    front = FrontEnd(unwrapped(as_sent(model, update)), audited.layer.name, task.input_shape)
    found = audited.inversion
    if found is None or found.evidence is None or found.factors is None or not found.scale_known:
        raise OptionError("the size of the features is unknown, because the layer has no bias")
    claimed = torch.nonzero(audited.is_recovered)[:, 0]
    claimed = claimed[claimed < len(found.directions)]
    errors = torch.tensor([audited.claims[row].error for row in claimed.tolist()], dtype=torch.float64)
    features = found.inputs.to(update.gradients[audited.layer.weight].device)[claimed].double()
    enough = _enough_equations(front, features, errors, task.memory)
    few, claimed, errors, features = int((~enough).sum()), claimed[enough], errors[enough], features[enough]
    if time_is_up():
        raise OptionError(OUT_OF_TIME)
    noise = (SAFETY_FACTOR * errors).clamp(MIN_NOISE, MAX_SOLVED_RESIDUAL).to(features)
    pictures = solve(front, features, noise, generator=task.generator)
    solved = pictures.residual <= noise
    good = (solved & torch.isfinite(pictures.slope)).cpu()
    if not bool(good.any()):
        raise OptionError(_why_nothing(front, pictures, solved))
    why_missing = _why_missing(few + int((solved.cpu() & ~good).sum()), pictures.residual[~solved])
    rows, pictures, errors = claimed[good], select_rows(pictures, good.to(features.device)), errors[good]
    inversion = _rows_of(found, found.evidence, rows, pictures)
    layer = replace(
        audited.layer,
        name=f"input (from {audited.layer.name})",
        features=front.unknowns,
        sees=Sees.INPUTS_FROM_FEATURES,
        reason=f"from the features that layer {audited.layer.name} receives ({_counts(pictures.equations)} for the "
        f"{front.unknowns:,} values of an input of shape {_shape(front)})",
    )
    on_features = replace(inversion, inputs=found.inputs[rows])
    network, signals = FlatInputs(model, front.shape), None
    try:
        signals = replay_alone(network, update, audited.layer, on_features, task.loss, inputs=pictures.inputs)
    except OutOfTimeError:
        raise OptionError(OUT_OF_TIME) from None
    except OptionError:  # the layer alone then supports the claims
        pass
    known = replace(Known.about(audited.layer, update, task), one_row_each=True)
    claims = claims_of(on_features, patterns_of(audited.layer, on_features.inputs, update), signals, known)
    implied = torch.maximum(pictures.error.cpu(), pictures.slope.cpu() * errors / pictures.equations.cpu().sqrt())
    claims = tuple(map(_with_error, claims, (SAFETY_FACTOR * implied).tolist(), pictures.equations.tolist()))
    labels = None if signals is None or task.loss is None else signals.labels
    return LayerAudit(layer, layer.reason + why_missing, inversion, labels, claims), network


def _enough_equations(
    front: FrontEnd, features: Float[Tensor, "k m"], errors: Float[Tensor, "k"], memory: int | None
) -> Bool[Tensor, "k"]:
    """Return which feature vectors have more entries that are not zero than an input has unknowns.

    Raises:
        OptionError: if none has, or if the Jacobian does not fit into memory.
    """
    large = features.abs() > (errors.to(features) * torch.linalg.vector_norm(features, dim=1))[:, None]
    counts = large.sum(1).cpu()
    if int(counts.max()) <= front.unknowns:
        most = f"at most {int(counts.max()):,} of {front.features:,} features are not zero"
        why = f"for {front.unknowns:,} unknowns of an input of shape {_shape(front)}"
        raise OptionError(f"{most}, {why}, so many inputs have the same features")
    needed = JACOBIAN_COPIES * 8 * front.unknowns * max(front.unknowns, front.features)
    if memory is not None and needed > memory:
        size = f"{needed / 2**30:.3g} GiB for {front.features:,} equations and {front.unknowns:,} unknowns"
        raise OptionError(f"the equations take about {size}, more than memory= (--memory) allows")
    return counts > front.unknowns


def _why_nothing(front: FrontEnd, pictures: Pictures, solved: Tensor) -> str:
    """Return why no feature vector gave an input."""
    shape = _shape(front)
    if bool(solved.any()):
        counts = f"{_counts(pictures.equations[solved])} for {front.unknowns:,} unknowns"
        return f"{counts} do not determine an input of shape {shape}"
    why = f"no input of shape {shape} with these features was found"
    if front.batch_norm:
        why += "; BatchNorm comes before the layer, and mixes the samples of a batch in training mode"
    return why


def _why_missing(undetermined: int, residuals: Float[Tensor, "unsolved"]) -> str:
    """Return how many feature vectors gave no input, and how near the searches for the others came.

    >>> _why_missing(0, torch.tensor([0.02]))
    '; the search for 1 more ended with 2 % of its features unexplained'
    """
    left = ", ".join(f"{100 * each:.2g} %" for each in residuals.clamp(max=1).tolist())
    verb = "vector does" if undetermined == 1 else "vectors do"
    text = f"; {undetermined} more feature {verb} not determine an input" if undetermined else ""
    if not left:
        return text
    return f"{text}; the search for {len(residuals)} more ended with {left} of its features unexplained"


def _shape(front: FrontEnd) -> str:
    """Return the shape of an input, and whether it is a guess."""
    return "x".join(map(str, front.shape)) + (" (a guess)" if front.guessed else "")


def _counts(equations: Int[Tensor, "k"]) -> str:
    """Return the range of the numbers of equations.

    >>> _counts(torch.tensor([1200, 1100]))
    '1,100 to 1,200 equations'
    """
    least, most = int(equations.min()), int(equations.max())
    return f"{least:,} equations" if least == most else f"{least:,} to {most:,} equations"


def _rows_of(found: Inversion, evidence: Evidence, rows: Tensor, pictures: Pictures) -> Inversion:
    """Return the inversion of some features, with pictures as its inputs."""
    chosen = to_device(select_rows(evidence, rows.to(evidence.error.device)), torch.device("cpu"))
    equations = {"equations": pictures.equations.cpu(), "feature_residual": pictures.residual.cpu()}
    return replace(
        found,
        inputs=pictures.inputs,
        certified=found.certified[rows],
        directions=found.directions[rows],
        zeros=found.zeros[rows],
        fits=found.fits[rows],
        evidence=replace(chosen, details={**chosen.details, **equations}),
    )


def _with_error(claim: Claim, error: float, equations: int) -> Claim:
    """Return a claim with at least the error that the equations imply."""
    if not claim.recovered:
        return claim
    error = max(claim.error, error)
    if error > MAX_ERROR:
        return Claim.fitting("the features leave the input too uncertain", claim.samples)
    kind = claim.kind if error <= EXACT else ClaimKind.APPROXIMATE
    return replace(claim, kind=kind, error=error, why=f"{claim.why}; {equations:,} features determine the input")
