"""An audit in sentences: the verdict, and what it does not say."""

import math
from dataclasses import dataclass

from spearpp.auditing.claims import Kind, reasons
from spearpp.auditing.estimate import Estimate
from spearpp.auditing.replay import Replay
from spearpp.auditing.result import LayerAudit, Verdict, best_of
from spearpp.update import ClientUpdate


@dataclass(frozen=True)
class Context:
    """Everything the sentences are made from."""

    verdict: Verdict
    audits: list[LayerAudit]
    update: ClientUpdate
    model_given: bool
    replayable: bool
    """Whether a model was given, or one was assumed and proved."""
    batch_size: int | None
    decay: float
    again: Replay | None
    trained: Estimate | None
    interrupted: bool
    unseen: str | None
    """Why there was no replay, where memory forbade it."""


def summary(context: Context, seconds: float) -> str:
    """The verdict in a sentence."""
    best = best_of(context.audits)
    if best is not None:
        return f"LEAKS: {recovered(best)} from layer {best.layer.name}{_besides(best)}"
    if context.verdict is Verdict.NOT_FOUND:
        tried = sum(each.feasible and each.inversion is not None for each in context.audits)
        where = f"{tried} layers" if tried > 1 else "one layer"
        fitting = max(context.audits, key=lambda each: each.fitting)
        if fitting.fitting:
            return f"NOT_FOUND: no input was proved to be a training sample, but {uncertified(fitting)}"
        return f"NOT_FOUND: nothing was recovered from {where} in {seconds:.3g} s; that is no proof of safety"
    why = [each.reason for each in context.audits]
    return "NOT_APPLICABLE: " + (f"no layer can be inverted ({why[0]})" if why else "the model has no Linear layer")


def recovered(audited: LayerAudit) -> str:
    """How many inputs were recovered, and how exactly."""
    what = "samples' features" if audited.layer.sees == "features" else "training inputs"
    count = f"{len(audited.inputs)} of {audited.batch_size} {what} were recovered"
    if audited.approximate:
        return f"{count} up to a relative error of {audited.error:.2g}"
    found = [each for each in audited.claims if each.recovered]
    if all(each.kind is Kind.ONE for each in found):
        return f"{count} exactly"
    apart = max(each.apart for each in found)
    if apart == math.inf and all(each.samples == 1 for each in found):
        return f"{count} (each is one sample, averaged over the local steps)"
    if apart < math.inf:
        return f"{count} exactly (each is one sample, or the mean of samples at most {apart:.1%} apart)"
    return f"{count} (each is one sample, or the weighted mean of samples that activate the same neurons)"


def uncertified(audited: LayerAudit) -> str:
    """How many inputs fit without being proved to be samples, and why."""
    several = [each for each in audited.claims if each.kind is Kind.SEVERAL]
    noun = "input fits" if audited.fitting == 1 else "inputs fit"
    why = reasons(audited.claims, Kind.SEVERAL if several else Kind.FITS)
    return f"{audited.fitting} {noun} the gradient of layer {audited.layer.name} ({why})"


def _besides(audited: LayerAudit) -> str:
    return f"; {uncertified(audited)} as well" if audited.fitting else ""


def caveats(context: Context) -> list[str]:
    """What a reader of the verdict has to know besides."""
    said = ["The audit was interrupted: it holds what had been found by then, and more may be there."]
    said = said if context.interrupted else []
    said += _about_claims(context)
    for each in context.audits:
        said += _about_layer(each, context)
    if context.decay:
        said.append(f"Weight decay of {context.decay:.3g} was taken off the update.")
    if context.update.clients > 1:
        clients = context.update.clients
        said.append(f"The update is a sum of {clients} clients': which client an input belongs to is not told.")
    return said + _about_replay(context)


def _about_claims(context: Context) -> list[str]:
    best = best_of(context.audits)
    if best is None:
        return ["Nothing found is no proof of safety: other attacks, a larger budget or another round may find more."]
    said = ["The recovered inputs are personal data: keep and share them as such."]
    kinds = {each.kind for each in best.claims}
    if Kind.ONE_OR_MEAN in kinds or Kind.APPROXIMATE in kinds:
        why = reasons(best.claims, Kind.ONE_OR_MEAN, Kind.APPROXIMATE)
        said.append(f"What a recovered input is: {why}.")
        if context.batch_size is None and context.update.clients == 1:
            said.append(
                "If you know how many samples the client trained on, say so (batch_size, --batch-size): then inputs "
                "can be proved to be single samples."
            )
    if best.recovered < (best.batch_size or 0):
        said.append("Samples whose gradient lies below the noise are not seen and not counted.")
    return said


def _about_layer(audited: LayerAudit, context: Context) -> list[str]:
    found, name = audited.inversion, audited.layer.name
    if found is None:
        return []
    said = []
    missing = found.batch_size - len(audited.inputs)
    if audited.feasible and missing > 0 and audited.recovered:
        said.append(f"Layer {name}: {missing} of {found.batch_size} samples were not recovered.")
    if context.batch_size is not None and audited.batch_size not in (0, context.batch_size):
        said.append(
            f"Layer {name}: its gradient shows {audited.batch_size} samples, the client has {context.batch_size}. "
            "Samples that are equal, depend on each other or have no gradient are not seen on their own."
        )
    merged = [each for each in audited.claims if each.kind is Kind.SEVERAL]
    if merged:
        noun = "input stands" if len(merged) == 1 else "inputs stand"
        said.append(f"Layer {name}: {len(merged)} recovered {noun} for several samples, or for one several times.")
    if not found.scale_known and len(audited.inputs):
        said.append(f"Layer {name} has no bias: its inputs are known up to a positive factor each.")
    if len(audited.inputs) and audited.layer.assumed:
        said.append(f"Layer {name}: that a ReLU follows was assumed; the certificates prove it.")
    return said


def _about_replay(context: Context) -> list[str]:
    again, said = context.again, []
    if not context.model_given and context.replayable:
        said.append(
            "No model was given. The update was taken for that of Linear layers with one activation between them; "
            "recovered inputs that explain their part of the update when they are replayed through it prove that."
        )
    elif not context.model_given:
        said.append("Without a model neither labels nor a replay are possible.")
    elif context.unseen is not None:
        said.append(context.unseen)
    elif context.verdict is Verdict.LEAKS and again is None:
        said.append("No replay: inputs are missing, labels could not be told, or the model does not take the inputs.")
    if again is None:
        return said
    if again.scale < 0:
        said.append("The update goes uphill, away from what training does: are the weights before and after swapped?")
    if again.difference > 1e-2 and (context.trained is None or context.trained.steps is None):
        said.append(
            f"A replay with one step differs by {again.difference:.1%} (mixed inputs: {again.mixed:.0%}, unrelated "
            f"ones: {again.unrelated:.0%}): several local steps, another loss, noise, or layers that behave otherwise "
            "in training."
        )
    return said
