"""Audit a client's update: plan which layers to invert, run the searches, judge the recovered inputs."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from spearpp.auditing.claims import Claim, ClaimKind
from spearpp.auditing.estimate import training_findings
from spearpp.auditing.judge import judge_all
from spearpp.auditing.plan import make_plan
from spearpp.auditing.result import AuditResult, LayerAudit, Verdict, verdict_of
from spearpp.auditing.rounds import audit_rounds
from spearpp.auditing.run import run_searches
from spearpp.auditing.task import MEMORY, SEARCH_SHARE, Budget, Task
from spearpp.auditing.vocabulary import Vocabulary, Words, audit_vocabulary
from spearpp.auditing.wording import UNREPLAYED, Context, worded
from spearpp.inversion.result import Progress
from spearpp.linalg.chunks import single_thread_if_small
from spearpp.model import Layer, named_as
from spearpp.model.embeddings import find_tables
from spearpp.model.loss import Loss
from spearpp.search import Search
from spearpp.update import ClientUpdate
from spearpp.update.lazy import tensor_specs

WEIGHTS_WORTH_A_SECOND_THREAD = 2**20
"""Number of weights from which a second thread helps an audit. Measured with 700,000 weights: a second thread on
two idle cores saves 0.06 of 0.23 s. On cores that another process also uses, two threads take 10 s."""

__all__ = ["AuditResult", "Claim", "ClaimKind", "LayerAudit", "Verdict", "Vocabulary", "audit"]


def audit(
    update: ClientUpdate | list[ClientUpdate] | tuple[ClientUpdate, ...],
    model: nn.Module | None = None,
    *,
    budget: float | None = None,
    memory: int | None = MEMORY,
    search: Search | None = None,
    batch_size: int | None = None,
    loss: str = "cross-entropy",
    input_shape: tuple[int, ...] | None = None,
    vocabulary: Words | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[Layer, Progress], None] | None = None,
) -> AuditResult:
    """Find out whether training samples can be recovered from a client's update.

    The audit inverts the Linear layers of the model until all inputs of the model are recovered. (The inputs of later
    layers follow from the inputs of the model.) If a ReLU follows a layer, the audit searches for sparse directions,
    and uses the gradient of the next layer if there is one. For any other activation, and for a ReLU layer whose inputs
    were not all certified, the audit solves the equations of the network after the layer. A layer whose gradient has
    rank one is inverted whatever follows it. A layer after convolutions receives features. If the features determine
    the inputs of the model, the audit computes these inputs. Finally, the audit replays each recovered input alone
    through the model, to determine how many samples the input stands for and how large its error may be
    (``spearpp.auditing.claims``).

    If the model has embedding tables, the audit also finds the rows that the training looked up: the vocabulary of the
    client (``spearpp.auditing.vocabulary``).

    The verdict is LEAKS if at least one input has the claim "one sample", "one sample or a mean" or "approximate", or
    if a table reveals a vocabulary. It is NOT_FOUND if nothing was recovered within the budget. The result then counts
    the inputs that fit the gradient without a proof, and says why they are not proved. The verdict is NOT_APPLICABLE if
    no layer can be inverted.

    An update in files is checked first, then read one layer at a time. Its tensors are not kept in memory.

    Ctrl-C ends the search, not the call: the result contains what was certified until then, and ``interrupted`` is
    True.

    Args:
        update: what the client sent; or a list of what it sent in several rounds, oldest first, each with the weights
            that the round started from. The rounds are audited one by one and then joined
            (``spearpp.auditing.rounds``).
        model: the network. The audit uses it to determine what follows each layer, to find labels and to replay inputs.
            None if the network is not known.
        budget: seconds for the whole audit; None for no limit. Each search gets a share of the budget. A search that is
            still running at the end of its share stops, and its results so far are kept.
        memory: bytes that the work on one layer may take. Larger layers are skipped, and the caveats say so. None means
            no limit.
        search: the search to run for layers that a ReLU follows. None runs a short ``spearpp.search.Gated`` and then,
            if an input is missing, ``spearpp.search.Equations``. ``Gated()`` never solves the equations of the network.
            ``Equations()`` solves them for every layer. Layers before other activations always need them.
        batch_size: how many samples the client trained on, if this is known (Flower's ``num-examples``). With this
            number, an input can be proved to be one sample. Without this number, an input may also be the mean of
            several samples. If the loss is known, the claim then states how far apart these samples can be.
        loss: the loss that the client trained with: "cross-entropy"; "mse" or "bce" with one-hot targets; or "unknown".
            If the loss is unknown, the equations of the network use the inputs of the layers only, no output layer is
            inverted, and nothing is replayed. For a model with one output, the loss need not be known. The search for
            ReLU layers never uses the loss.
        input_shape: shape of one input of the model, such as (3, 32, 32), if it is known. The shape is used if the
            first Linear layer comes after other layers, such as convolutions. None guesses a square picture.
        vocabulary: the words or column values of the rows of an embedding table, as a list, or as a mapping from the
            names of tables to lists. The result then names words instead of row numbers only.
        generator: source of randomness; None is a generator with seed 0.
        progress: called after every round of a search with the layer and its progress.

    Raises:
        SpearError: if ``update`` is not an update, or its file is damaged, changed or missing. If nothing is recovered,
            the result says so and no error is raised.

    >>> import torch, spearpp
    >>> from spearpp import simulate
    >>> model = simulate.mlp(30, [90, 90], 10, generator=torch.Generator().manual_seed(2))
    >>> batch = simulate.random_batch(6, features=30, generator=torch.Generator().manual_seed(1))
    >>> update = simulate.FedSGD()(model, batch)
    >>> result = spearpp.audit(update, model, batch_size=6)
    >>> print(result.summary)
    LEAKS: 6 of 6 training inputs were recovered exactly from layer 0
    >>> bool((result.layers[0].labels.sort().values == batch.labels.sort().values).all())
    True
    >>> result.replay.difference < 1e-5
    True
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    known_loss = Loss.named(loss)
    task = Task(model, budget, memory, search, batch_size, known_loss, input_shape, vocabulary, generator, progress)
    if not isinstance(update, list | tuple):
        return _audit_one(update, task)
    return audit_rounds(update, task, lambda one, seconds: _audit_one(one, replace(task, budget=seconds)))


def _audit_one(update: ClientUpdate, task: Task) -> AuditResult:
    """Audit one update: plan, run, judge. The audit of a small network uses one CPU thread."""
    update = named_as(update, task.model)
    with single_thread_if_small(_work_of(update), torch.device("cpu"), WEIGHTS_WORTH_A_SECOND_THREAD):
        return _audited(update, task)


def _work_of(update: ClientUpdate) -> int:
    """Return the number of weights, or a number above all limits for convolutions and for weights on a GPU."""
    specs = tensor_specs(update.weights).values()
    small = all(len(each.shape) <= 2 and each.device.type == "cpu" for each in specs)
    return sum(each.numel() for each in specs) if small else sys.maxsize


def _audited(update: ClientUpdate, task: Task) -> AuditResult:
    began, whole, of_search = time.monotonic(), Budget.of(task.budget), Budget.of(task.budget, SEARCH_SHARE)
    plan = make_plan(update, task)
    tables = audit_vocabulary(update, find_tables(task.model, update), task.vocabulary)
    audits, interrupted = run_searches(plan, task, of_search)
    judged = judge_all(audits, plan, task, whole.deadline)
    late = whole.spent and judged.replay is None and any(len(each.claims) for each in judged.audits)
    result = AuditResult(
        verdict=verdict_of(judged.audits, tables, tried=any(each.invertible for each in judged.audits)),
        summary="",
        layers=judged.audits,
        findings=[*plan.findings, *training_findings(judged.estimate, update)],
        caveats=[*([UNREPLAYED] if late else []), *plan.left_out],
        interrupted=interrupted or judged.interrupted,
        replay=judged.replay,
        estimated=judged.estimate,
        vocabulary=tables,
        seconds=time.monotonic() - began,
        budget=task.budget,
    )
    return worded(Context(result, update, task, judged.network is not None, plan.decay, plan.replay_skipped))
