"""The sentences of an audit: the summary of the verdict, and the caveats."""

import math
from dataclasses import dataclass, replace

from spearpp.auditing.claims import ClaimKind, reasons
from spearpp.auditing.result import AuditResult, History, LayerAudit, Verdict, whole_batches
from spearpp.auditing.task import Task
from spearpp.model import Sees
from spearpp.model.loss import Loss
from spearpp.update import ClientUpdate

UNREPLAYED = "The time budget ended before every recovered input was replayed. A larger budget may prove more of them."
"""Caveat of an audit that ran out of time after its searches."""
LARGE_DIFFERENCE = 1e-2
"""Relative difference of a replay above which a caveat reports the difference. A design choice: 1 % is far above
rounding, so the replay does not describe the client's training completely."""


@dataclass(frozen=True)
class Context:
    """Everything that the sentences depend on."""

    result: AuditResult
    """The result, still without its sentences."""
    update: ClientUpdate
    task: Task
    """What the caller asked for."""
    replayable: bool
    """Whether a model was given, or a network was assumed and proved."""
    decay: float
    """The weight decay that was subtracted from the update."""
    replay_skipped_because: str | None
    """A sentence if the model was not replayed because of the memory limit, else None."""


def worded(context: Context) -> AuditResult:
    """Return the result with its summary, and with all caveats before those that it has already."""
    result = context.result
    return replace(result, summary=summary(context), caveats=[*caveats(context), *result.caveats])


def summary(context: Context) -> str:
    """Return the verdict in one sentence."""
    result = context.result
    best = result.best
    if best is not None:
        more = f"; {_uncertified(best, 'more ')}" if best.fitting else ""
        where = f"from layer {best.layer.name}"
        if best.layer.sees == Sees.INPUTS_FROM_FEATURES:
            where = best.layer.reason
        return f"LEAKS: {_recovered(best)} {where}{more}{_looked_up(context, '; ')}"
    if result.verdict is Verdict.LEAKS:
        return f"LEAKS: the vocabulary of this client, but no inputs: {_looked_up(context)}"
    if result.verdict is Verdict.NOT_FOUND:
        fitting = max(result.layers, key=lambda each: each.fitting)
        if fitting.fitting:
            return f"NOT_FOUND: no input was proved to be a training sample; {_uncertified(fitting)}"
        tried = sum(each.invertible and each.inversion is not None for each in result.layers)
        where = f"{tried} layers" if tried > 1 else "one layer"
        return f"NOT_FOUND: no input was recovered from {where} in {result.seconds:.3g} s; this does not prove safety"
    qualified = [each.reason for each in result.layers if each.layer.qualifies and not each.layer.output]
    why = qualified or [each.reason for each in result.layers]
    return "NOT_APPLICABLE: " + (f"no layer can be inverted ({why[0]})" if why else "the model has no Linear layer")


def _looked_up(context: Context, start: str = "") -> str:
    """Return how many rows of each embedding table the training looked up, or an empty string if there are none."""
    tables = [each for each in context.result.vocabulary if each.leaks]
    if not tables:
        return ""
    counts = (f"{each.count:,} of {each.rows:,} rows of the embedding {each.table}" for each in tables)
    return f"{start}{' and '.join(counts)} were looked up"


def _recovered(audited: LayerAudit) -> str:
    """Return how many inputs were recovered, and how exactly."""
    share = f"{len(audited.inputs)} of {audited.batch_size}"
    if audited.layer.sees == "features":
        return f"the features of {share} {audited.layer.noun} were recovered {how_exactly(audited)}"
    return f"{share} training inputs were recovered {how_exactly(audited)}"


def how_exactly(audited: LayerAudit) -> str:
    """Return how exactly the inputs of a layer were recovered, in words that follow "recovered"."""
    if audited.approximate:
        return f"up to a relative error of {audited.error:.2g}"
    found = [each for each in audited.claims if each.recovered]
    if all(each.kind is ClaimKind.ONE for each in found):
        return "exactly"
    apart, noun = max(each.apart for each in found), audited.layer.noun
    if apart == math.inf and all(each.samples == 1 for each in found):
        return "(each is one sample, averaged over the local steps if there were several)"
    if apart < math.inf:
        return f"(each is exactly one sample, or the exact mean of samples that differ from it by at most {apart:.1%})"
    alike = "are almost equal" if audited.layer.equations else "activate the same neurons"
    return f"(each is one {noun.removesuffix('s')}, or the weighted mean of several {noun} that {alike})"


def _uncertified(audited: LayerAudit, more: str = "") -> str:
    """Return how many inputs fit the gradient without proof that they are single samples, and why."""
    several = any(each.kind is ClaimKind.SEVERAL for each in audited.claims)
    why = reasons(audited.claims, ClaimKind.SEVERAL if several else ClaimKind.FITS)
    layer = f"the gradient of layer {audited.layer.name}"
    if audited.fitting == 1:
        return f"1 {more}input fits {layer}, but is not proved to be one sample because {why}"
    count = f"{audited.fitting} {more}inputs fit {layer}, but are not proved to be single samples"
    return f"{count} (most frequent reason: {why})"


def caveats(context: Context) -> list[str]:
    """Return sentences about what the verdict does not say, and about assumptions of the audit."""
    sentences = []
    if context.result.interrupted:
        sentences.append("The audit was interrupted. It reports what was found until then; more may be recoverable.")
    sentences += _about_claims(context) + _about_tables(context)
    for each in context.result.layers:
        sentences += _about_layer(each, context)
    if context.decay:
        whole = math.isclose(abs(context.decay) * context.update.scale, 1)
        what = "The whole weights were" if whole else f"Weight decay of {context.decay:.3g} was"
        sentences.append(f"{what} subtracted from the update before the inversion.")
    if context.update.clients > 1:
        clients = f"The update is the sum of the updates of {context.update.clients} clients."
        sentences.append(f"{clients} The audit does not show which client a recovered input belongs to.")
    return sentences + _about_replay(context)


def _about_claims(context: Context) -> list[str]:
    """Return caveats about the claims for the best layer."""
    result, task = context.result, context.task
    best = result.best
    if best is None and result.verdict is Verdict.LEAKS:
        return ["Treat the vocabulary of the client as personal data when you store or share it."]
    if best is None:
        sentences = [
            "Finding nothing does not prove that the update is safe. Another attack, a larger time budget or another "
            "training round may recover inputs."
        ]
        if task.loss is not None and any(each.layer.equations and each.invertible for each in result.layers):
            sentences.append(
                f"The equations of the network were those of the loss {task.loss}. If the client trained with "
                "another loss, pass this loss (loss=, --loss)."
            )
        if result.verdict is Verdict.NOT_FOUND and context.update.kind == "weights":
            sentences.append(
                "The audit also finds nothing if the weights before and after training were swapped, or if the weights "
                "before training belong to another round. Check both."
            )
        if task.model is not None and any(each.layer.assumed and each.invertible for each in result.layers):
            sentences.append(
                "The activation function was assumed. If the network has another one, name your own model (--model "
                "pkg.mod:Net), or give none, so that the audit tries several activation functions."
            )
        if any(each.fitting for each in result.layers):
            sentences += _about_batch_size(context)
        return sentences
    sentences = ["Treat the recovered inputs as personal data when you store or share them."]
    kinds = {each.kind for each in best.claims}
    if ClaimKind.ONE_OR_MEAN in kinds or ClaimKind.APPROXIMATE in kinds:
        why = reasons(best.claims, ClaimKind.ONE_OR_MEAN, ClaimKind.APPROXIMATE)
        sentences.append(f"Claim for a typical recovered input: {why}.")
        sentences += _about_batch_size(context)
    if best.exact < (best.batch_size or 0):
        sentences.append("The audit cannot see or count samples whose gradient is smaller than the noise.")
    return sentences


def _about_batch_size(context: Context) -> list[str]:
    """Return the advice to pass the batch size, if the caller did not pass it and it can prove more."""
    if context.task.batch_size is not None or context.update.clients > 1:
        return []
    proof = "single samples" if context.update.one_gradient else "single samples, averaged over the local steps"
    return [
        "If you know how many samples the client trained on, pass this number (batch_size=, --batch-size). The audit "
        f"can then prove that inputs are {proof}."
    ]


def _about_tables(context: Context) -> list[str]:
    """Return caveats about the embedding tables."""
    sentences = []
    if any(each.count for each in context.result.vocabulary):
        sentences.append(
            "The training looked up the named rows of embedding tables. They are tokens, categories or items of this "
            "client, unless the training also draws rows that are not in its data, as negative sampling and random "
            "replacement of tokens do, or the optimiser kept momentum of another client. Rows of an earlier round are "
            "included if the client kept the state of its optimiser. The audit assumes that the loss does not use a "
            "table outside of the model."
        )
    for each in context.result.vocabulary:
        if each.positions:
            first = f"Embedding {each.table}: the first {each.count} rows were looked up, as in a table of positions."
            sentences.append(f"{first} They do not count as a vocabulary.")
        elif not each.count:
            sentences.append(f"Embedding {each.table}: nothing is claimed, because {each.reason}.")
    return sentences


def _count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> _count(1, "samples"), _count(2, "tokens")
    ('1 sample', '2 tokens')
    """
    return f"{number:,} {noun.removesuffix('s') if number == 1 else noun}"


def _about_layer(audited: LayerAudit, context: Context) -> list[str]:
    """Return caveats about one layer."""
    found, name = audited.inversion, audited.layer.name
    if found is None:
        return []
    sentences, noun, told = [], audited.layer.noun, context.task.batch_size
    missing = found.batch_size - len(audited.inputs)
    if audited.invertible and missing > 0 and audited.exact:
        sentences.append(f"Layer {name}: {missing} of {found.batch_size} {noun} were not recovered.")
    if told is not None and 0 < found.batch_size < told:
        sentences.append(
            f"Layer {name}: its gradient shows {_count(found.batch_size, noun)}, but the client trained on "
            f"{told} samples. Equal samples, linearly dependent samples and samples without a gradient "
            "do not increase the number that the gradient shows."
        )
    elif told is not None and found.batch_size > told and not audited.layer.tokens:
        sentences.append(
            f"Layer {name}: its gradient shows {found.batch_size} different inputs, but the client trained on "
            f"{told} samples. Possible reasons: the given number is too small, the layer acts on every token or "
            "patch of a sample, the client trained for several steps, or the update contains noise."
        )
    merged = sum(each.kind is ClaimKind.SEVERAL for each in audited.claims)
    if merged:
        noun = "input is" if merged == 1 else "inputs are each"
        what = "the weighted mean of several samples, or one sample that occurs several times"
        sentences.append(f"Layer {name}: {merged} {noun} {what}.")
    if not found.scale_known and len(audited.inputs):
        sentences.append(f"Layer {name} has no bias, so each of its inputs is known only up to a positive factor.")
    if len(audited.inputs) and audited.layer.assumed and found.batch_size > 1:
        what = "its activation function" if audited.layer.equations else "that a ReLU follows"
        what = f"that it is the output layer of a classifier with {context.task.loss}" if audited.layer.output else what
        sentences.append(f"Layer {name}: the audit assumed {what}. The certificates prove this assumption.")
    return sentences


def _about_replay(context: Context) -> list[str]:
    """Return caveats about the model, the loss and the replay of the update."""
    task, whole_replay, sentences = context.task, context.result.replay, []
    if task.loss not in (None, Loss.CROSS_ENTROPY):
        sentences.append(f"The audit used the given loss, {task.loss}, with one-hot targets.")
    if task.loss is None:
        sentences.append(
            "The loss is unknown, so the audit used only equations that hold for every loss, and could neither find "
            "labels nor replay the update."
        )
    elif task.model is None and context.replayable:
        sentences.append(
            "No model was given. The audit assumed a chain of Linear layers with one activation function between them. "
            "The recovered inputs prove the assumption: replayed through this network, they match their part of the "
            "update."
        )
    elif task.model is None:
        sentences.append("No model was given, so the audit could neither find labels nor replay the update.")
    elif context.replay_skipped_because is not None:
        sentences.append(context.replay_skipped_because)
    elif context.result.verdict is Verdict.LEAKS and whole_replay is None:
        why = "some inputs or labels are missing"
        if whole_batches(context.result.layers):
            why = "the model does not accept flat inputs, or the time budget ended"
        sentences.append(f"The update was not replayed as a whole, because {why}.")
    if whole_replay is None:
        return sentences
    if whole_replay.scale < 0:
        sentences.append(
            "The update increases the loss, but training should decrease it. Check whether the weights before and "
            "after training were swapped."
        )
    if whole_replay.difference > LARGE_DIFFERENCE and (
        context.result.estimated is None or context.result.estimated.steps is None
    ):
        sentences.append(
            f"A replay with one step differs from the update by {whole_replay.difference:.1%} (with averaged inputs by "
            f"{whole_replay.mixed:.0%}, with unrelated inputs by {whole_replay.unrelated:.0%}). "
            "Possible reasons: several local steps, another loss, noise, or layers that behave differently in training."
        )
    return sentences


def summary_of_rounds(history: History) -> str:
    """Return how many rounds were audited and what they gave, in words that continue the summary."""
    count = len(history.rounds)
    if count < 2:
        return ""
    if not history.known_from:
        return f"; {count} rounds were audited"
    alone = f"at most {history.recovered_alone} from a single round"
    return f"; {len(history.known_from)} from {count} rounds together, {alone}"


def caveats_of_rounds(history: History, shown: int) -> list[str]:
    """Return the caveats about several rounds. ``shown`` is the index of the round that the inputs are shown from."""
    sentences = []
    if shown < len(history.rounds) - 1 and history.rounds[shown].recovered:
        sentences.append(f"The inputs were recovered from round {shown + 1} alone.")
    if history.joined and len(history.joined) < len(history.rounds):
        names = ", ".join(str(index + 1) for index in history.joined)
        count = f"{len(history.joined)} of {len(history.rounds)} rounds were joined: {names}."
        sentences.append(f"{count} The others repeat a gradient, or memory does not allow more rounds.")
    if not history.joined and len(history.rounds) > 1:
        sentences.append(f"The rounds were not joined: {history.outcome}.")
    elif not history.known_from:
        sentences.append(f"The joined rounds gave no input: {history.outcome}.")
    return sentences
