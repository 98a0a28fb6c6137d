"""An audit in sentences: the verdict, and what it does not say."""

from torch import nn

from spearpp.audit.result import LayerAudit, Verdict, best_of
from spearpp.estimate import Estimate
from spearpp.replay import Replay
from spearpp.update import ClientUpdate


def summary(verdict: Verdict, audits: list[LayerAudit], seconds: float, again: Replay | None) -> str:
    """The verdict in a sentence."""
    best = best_of(audits, again)
    if best is not None:
        what = "samples' features" if best.layer.sees == "features" else "training inputs"
        if best.recovered == len(best.inputs) > 0:
            how = "exactly"
        elif len(best.inputs):
            how = f"up to an error of {best.error:.1%} of their size"
        else:
            how = "up to noise: none is certified, but computed again from them the update differs by "
            how += f"{again.difference:.1%}," if again is not None else ""
        count = len(best.inputs) or best.batch_size
        return f"LEAKS: {count} of {best.batch_size} {what} were recovered {how} from layer {best.layer.name}"
    if verdict is Verdict.NOT_FOUND:
        tried = sum(each.feasible and each.inversion is not None for each in audits)
        where = f"{tried} layers" if tried > 1 else "one layer"
        return f"NOT_FOUND: nothing was recovered from {where} in {seconds:.3g} s; that is no proof of safety"
    reasons = [each.reason for each in audits]
    return "NOT_APPLICABLE: " + (
        f"no layer can be inverted ({reasons[0]})" if reasons else "the model has no Linear layer"
    )


def caveats(
    verdict: Verdict,
    audits: list[LayerAudit],
    update: ClientUpdate,
    model: nn.Module | None,
    batch_size: int | None,
    decay: float,
    again: Replay | None,
    trained: Estimate | None,
    interrupted: bool,
    unseen: str | None = None,
) -> list[str]:
    """What a reader of the verdict has to know besides."""
    said = []
    if interrupted:
        said.append("The audit was interrupted: it holds what had been found by then, and more may be there.")
    if verdict is Verdict.LEAKS:
        said.append("The recovered inputs are personal data: keep and share them as such.")
        said.append(
            "Samples that fire exactly the same neurons are one to the gradient: they come back as one mixture."
        )
        best = best_of(audits, again)
        if best is not None and best.recovered < (best.batch_size or 0):
            said.append("Errors that are given count the noise alone; samples that lie below it are not seen.")
    else:
        said.append(
            "Nothing found is no proof of safety: other attacks, a larger budget or another round may find more."
        )
    for each in audits:
        if each.inversion is not None and each.feasible and each.inversion.missing and each.recovered:
            missing = f"{each.inversion.missing} of {each.inversion.batch_size} samples were not recovered"
            said.append(
                f"Layer {each.layer.name}: {missing}; samples with tiny gradients may lie below the noise unseen."
            )
        if each.inversion is not None and batch_size is not None and each.batch_size not in (0, batch_size):
            said.append(
                f"Layer {each.layer.name}: {each.batch_size} samples were read off the update, {batch_size} were given."
            )
        if each.inversion is not None and not each.inversion.scale_known and len(each.inputs):
            said.append(f"Layer {each.layer.name} has no bias: its inputs are known up to a positive factor each.")
        if len(each.inputs) and each.layer.assumed:
            said.append(f"Layer {each.layer.name}: that a ReLU follows was assumed; the certificates prove it.")
    if decay:
        said.append(f"Weight decay of {decay:.3g} was taken off the update.")
    if update.clients > 1:
        said.append(f"The update is a sum of {update.clients} clients': which client an input belongs to is not told.")
    if model is None:
        said.append("Without a model neither labels nor a replay are possible.")
    elif unseen is not None:
        said.append(unseen)
    elif verdict is Verdict.LEAKS and again is None:
        said.append("No replay: inputs are missing, labels could not be told, or the model does not take the inputs.")
    if again is not None and again.scale < 0:
        said.append("The update goes uphill, away from what training does: are the weights before and after swapped?")
    if again is not None and again.difference > 1e-2 and (trained is None or trained.steps is None):
        said.append(
            f"A replay with one step differs by {again.difference:.1%}: several local steps, another loss, noise, or "
            "layers that behave differently in training."
        )
    return said
