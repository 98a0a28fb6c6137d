"""Audits one step of every network of ``benchmarks.zoo_models``, with batches of 8 and 32, beside preflight's forecast.

    make bench NAME=zoo                                # all networks; finished rows are kept and skipped
    make bench NAME=zoo ARGS="--networks fedavg leaf"  # some of them
    make bench NAME=zoo ARGS="--redo --networks bert"  # measure again

Every row is stored in docs/results/zoo.json as soon as it is measured, and docs/models.md is written from that file.
The client trains in training mode and sends one float32 gradient. Pictures are CIFAR-10 test images (SPEARPP_DATA),
scaled to the input of the network; tables are columns of the breast-cancer data; tokens follow Zipf's law; bags and
categories are random. As in ``benchmarks.hostile``, a claim is wrong if it is farther than three times its stated error
from everything that the layer saw.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import spearpp
from benchmarks import command
from benchmarks.hostile import ROUNDING
from benchmarks.zoo_models import ADULT_CATEGORIES, ZOO, Network
from benchmarks.zoo_page import page
from spearpp import AuditResult, ClientUpdate, simulate
from spearpp.errors import SpearError
from spearpp.model import Sees
from spearpp.preflight import NOTHING, Preflight, preflight
from spearpp.types import Tensor
from spearpp.update.names import plain

SIZES = (8, 32)
STORE, PAGE = Path("docs/results/zoo.json"), Path("docs/models.md")


@dataclass(frozen=True)
class Row:
    """What the audit of one network and batch size gave."""

    network: str
    b: int
    verdict: str
    recovered: str
    """What was recovered, with numbers."""
    why: str
    """What limits the result: the summary, or why the inputs do not follow from features."""
    wrong: int
    """Claimed inputs, features, tokens or rows of embeddings that the client does not have."""
    forecast: str
    """What preflight says that the layers could reveal, with the largest batch."""
    simulated: str
    """What preflight's simulated audit recovered."""
    seconds: float
    """Duration of the audit."""
    budget: float
    """Seconds that the audit was allowed to take."""


def inputs_of(network: Network, model: nn.Module, b: int, seed: int, data: str | None) -> Tensor:
    """Draw the inputs of a batch."""
    generator = torch.Generator().manual_seed(seed)
    if network.data == "pictures":
        channels, side, _ = network.shape
        images = simulate.cifar10(b, path=data, generator=generator).inputs.reshape(b, 3, 32, 32)
        images = images.mean(1, keepdim=True) if channels == 1 else images
        if side > 32:
            return functional.interpolate(images, size=(side, side), mode="bilinear")
        margin = (32 - side) // 2
        return images[:, :, margin : margin + side, margin : margin + side].contiguous()
    if network.data == "table":
        return simulate.breast_cancer(b, generator=generator).inputs[:, : network.shape[0]]
    if network.data == "tokens":
        tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
        rows = tables[0].num_embeddings  # later tables are for positions
        frequencies = 1 / torch.arange(1, rows)
        drawn = torch.multinomial(frequencies, b * network.shape[0], replacement=True, generator=generator)
        return (1 + torch.randperm(rows - 1, generator=generator)[drawn]).reshape(b, -1)
    if network.data == "categories":
        columns = [torch.randint(rows, (b,), generator=generator).float() for rows in ADULT_CATEGORIES]
        numbers = torch.randn(network.shape[0] - len(columns), b, generator=generator)
        return torch.stack([*columns, *numbers], 1)
    return torch.randn(b, *network.shape, generator=generator).relu()


@dataclass(frozen=True)
class Client:
    """One step of a client, and what its layers saw."""

    update: ClientUpdate
    inputs: Tensor
    labels: Tensor
    seen: dict[str, Tensor]
    """By name of a Linear layer, the rows that it saw."""
    used: dict[str, set[int]]
    """By name of an embedding, the rows that were looked up."""


def train(network: Network, model: nn.Module, b: int, seed: int, data: str | None) -> Client:
    """Compute one gradient in training mode."""
    inputs = inputs_of(network, model, b, seed, data)
    seen: dict[str, Tensor] = {}
    used: dict[str, set[int]] = {}

    names = {module: plain(name) for name, module in model.named_modules()}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if isinstance(module, nn.Linear):
            seen[names[module]] = args[0].detach().reshape(-1, args[0].shape[-1]).double()
        else:
            used[names[module]] = set(args[0].flatten().tolist())

    layers = [each for each in names if isinstance(each, nn.Linear | nn.Embedding)]
    handles = [each.register_forward_pre_hook(note) for each in layers]
    torch.manual_seed(seed)
    outputs = model.train()(inputs)
    generator = torch.Generator().manual_seed(seed)
    if outputs.shape[1] == 1:
        labels = torch.randint(2, outputs.shape, generator=generator)
        loss = functional.binary_cross_entropy(outputs, labels.float())
    else:
        labels = torch.randint(outputs.shape[1], (b, *outputs.shape[2:]), generator=generator)
        loss = functional.cross_entropy(outputs, labels)
    loss.backward()
    for handle in handles:
        handle.remove()
    return Client(ClientUpdate.from_gradients(model), inputs.flatten(1).double(), labels, seen, used)


def describe(result: AuditResult) -> str:
    """Return what an audit recovered: the best layer and the vocabulary."""
    parts, best = [], result.best
    if best is not None:
        share, noun = f"{len(best.inputs)} of {best.batch_size}", best.layer.noun
        what = {Sees.INPUTS: "inputs", Sees.INPUTS_FROM_FEATURES: "inputs from features"}.get(Sees(best.layer.sees))
        labelled = best.labels is not None and bool((best.labels[best.is_recovered] >= 0).all())
        parts.append(
            (f"{what}: {share}" if what else f"features: {share} {noun}") + (", with labels" if labelled else "")
        )
    tables = [each for each in result.vocabulary if each.leaks]
    if len(tables) == 1:
        parts.append(f"vocabulary: {tables[0].count:,} rows of {tables[0].rows:,}")
    elif tables:
        parts.append(f"vocabulary: {sum(each.count for each in tables)} rows of {len(tables)} embeddings")
    return "; ".join(parts) or "nothing"


def explain(result: AuditResult) -> str:
    """Return the outcome of the layer that the result is about: the best one, or else the first one that was tried."""
    if result.best is not None:
        return f"layer {result.best.layer.name}: {result.best.reason}"
    tried = [each for each in result.layers if each.invertible and each.inversion is not None and not each.fitting]
    if result.fitting or not tried or result.verdict == "LEAKS":
        return result.summary.partition(": ")[2]
    return f"layer {tried[0].layer.name}: {tried[0].reason}"


def wrong(result: AuditResult, client: Client) -> int:
    """Return how many claims are not the client's."""
    count = 0
    for each in result.layers:
        name = each.layer.name
        truth = client.inputs if each.layer.sees == Sees.INPUTS_FROM_FEATURES else client.seen.get(name, client.inputs)
        if not len(each.inputs):
            continue
        distance = torch.cdist(each.inputs.double(), truth) / torch.linalg.vector_norm(truth, dim=1).clamp_min(1e-300)
        errors = torch.tensor([claim.error for claim in each.claims if claim.recovered], dtype=torch.float64)
        count += int((distance.amin(1) > (3 * errors).clamp_min(ROUNDING)).sum())
        if each.labels is not None and len(truth) == len(client.labels):
            labels = each.labels[each.is_recovered]
            count += int(((labels >= 0) & (labels != client.labels.flatten()[distance.argmin(1)])).sum())
    return count + sum(len(set(each.used) - client.used[each.table]) for each in result.vocabulary)


def forecast(found: Preflight) -> str:
    """Return what the layers could reveal, each with its largest batch."""
    bounds: dict[str, int | None] = {}
    for each in found.forecasts:
        if each.reveals != NOTHING and each.largest_batch != 0:
            known = bounds.get(each.reveals, 0)
            bounds[each.reveals] = (
                None if None in (known, each.largest_batch) else max(known or 0, each.largest_batch or 0)
            )
    return (
        "; ".join(f"{name} {'any b' if b is None else f'b ≤ {b:,}'}" for name, b in bounds.items()) or "nothing known"
    )


def measure(key: str, b: int, budget: float, data: str | None, seed: int = 1) -> Row:
    """Audit one batch of a network, and ask preflight about it."""
    network = ZOO[key]
    torch.manual_seed(seed)
    model = network.build()
    client = train(network, model, b, seed, data)
    began = time.perf_counter()
    result = spearpp.audit(client.update, model, batch_size=b, budget=budget, input_shape=network.shape)
    seconds = time.perf_counter() - began
    found = preflight(model, network.shape, b, budget=budget)
    return Row(
        *(key, b, str(result.verdict), describe(result), explain(result), wrong(result, client)),
        *(forecast(found), describe(found.simulated), seconds, budget),
    )


def main() -> int:
    """Measure what is missing, and write the page."""
    options = command.parser(__doc__)
    options.add_argument("--networks", nargs="+", choices=ZOO, default=list(ZOO), metavar="NAME")
    options.add_argument("--budget", type=float, default=60.0, help="seconds for each audit")
    options.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=SIZES, help="batch sizes")
    options.add_argument("--redo", action="store_true", help="measure again what is stored")
    given = options.parse_args()
    store = given.out or STORE
    rows = (
        {(each["network"], each["b"]): Row(**each) for each in json.loads(store.read_text())} if store.exists() else {}
    )
    try:
        for key in given.networks:
            for b in given.sizes:
                if given.redo or (key, b) not in rows:
                    rows[key, b] = row = measure(key, b, given.budget, given.data)
                    print(
                        f"{key} b={b}: {row.recovered} ({row.wrong} wrong, {row.seconds:.3g} s); "
                        f"preflight: {row.forecast}; simulated: {row.simulated}",
                        flush=True,
                    )
                    store.write_text(json.dumps([asdict(each) for each in rows.values()], indent=1) + "\n")
    except SpearError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    PAGE.write_text(page([asdict(rows[key, b]) for key in ZOO for b in SIZES if (key, b) in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
