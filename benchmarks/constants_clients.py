"""The clients of ``benchmarks.constants``: small clients for each search, kind of claim and kind of noise."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FrameType

import torch
from torch import nn

import spearpp
from benchmarks import equations, hostile
from benchmarks.embeddings import OPTIMISERS
from benchmarks.embeddings import client as embedding_client
from benchmarks.equations import network
from benchmarks.hostile_clients import FAMILIES
from benchmarks.rounds import audit as join
from spearpp import simulate
from spearpp.auditing import LayerAudit
from spearpp.auditing.vocabulary import audit_vocabulary
from spearpp.model.embeddings import find_tables
from spearpp.model.following import Following
from spearpp.simulate import DPSGD, Batch, Cast, Client, FedAvg, FedSGD, Quantise
from spearpp.update import ClientUpdate

EPOCHS = 5
"""Number of epochs of trained networks."""
SLOW = ("equations: no model", "equations: residual", "augmented over local epochs", "wide layer, m=1000")
"""Hostile families that are left out. They take more than five seconds for an update."""
Attack = Callable[[int, str | None], Counter[str]]
"""A client as a function from a seed and the place of CIFAR-10 to the counts of its attack."""


def images(b: int, seed: int, data: str | None, *, raw: bool = False) -> Batch:
    """Return CIFAR-10 test images."""
    return simulate.cifar10(b, path=data, normalise=not raw, generator=torch.Generator().manual_seed(seed))


def fresh(
    activation: str,
    b: int,
    *,
    m: int = 200,
    hidden: int = 3,
    client: Client | None = None,
    raw: bool = False,
    known: bool = True,
) -> Attack:
    """Return a client with a fresh network."""

    def attack(seed: int, data: str | None) -> Counter[str]:
        batch = images(b, seed, data, raw=raw)
        model = network(activation, batch.inputs.shape[1], [m] * hidden, seed)
        update = (client or FedSGD())(model, batch, torch.Generator().manual_seed(seed))
        return audited(update, model if known else None, batch)

    return attack


def trained(activation: str, b: int) -> Attack:
    """Return a client whose network has learned the digits of scikit-learn."""

    def attack(seed: int, data: str | None) -> Counter[str]:
        del data
        every = simulate.digits(1797, generator=torch.Generator().manual_seed(0))
        model = network(activation, every.inputs.shape[1], [100] * 3, 0)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.manual_seed(0)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(every.inputs)).split(32):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(every.inputs[rows]), every.labels[rows]).backward()
                optimiser.step()
        batch = simulate.digits(b, generator=torch.Generator().manual_seed(seed))
        return audited(FedSGD()(model, batch), model, batch, told=False)

    return attack


def by_equations(b: int, *, raw: bool = False) -> Attack:
    """Return a client with a fresh ReLU network, attacked by the equations of the network alone."""

    def attack(seed: int, data: str | None) -> Counter[str]:
        batch = images(b, seed, data, raw=raw)
        first, *later = simulate.fedsgd(network("relu", batch.inputs.shape[1], [200] * 3, seed), batch)
        result = spearpp.invert(*first, following=Following.of_layers("relu", later), batch_size=b)
        certified = int(result.certified.sum())
        return Counter(recovered=certified, wrong=equations.wrong(batch, result), steps=result.stats.steps)

    return attack


def photographs(b: int, client: Client) -> Attack:
    """Return a client with parts of photographs, many of which look alike."""

    def attack(seed: int, data: str | None) -> Counter[str]:
        del data
        batch = simulate.photographs(b, generator=torch.Generator().manual_seed(seed))
        model = simulate.mlp(batch.inputs.shape[1], [200, 200], 10, generator=torch.Generator().manual_seed(seed))
        return audited(client(model, batch, torch.Generator().manual_seed(seed)), model, batch)

    return attack


def rounds(activation: str, b: int, m: int, count: int, client: Client) -> Attack:
    """Return a client that sends several updates of the same samples, which are joined."""

    def attack(seed: int, data: str | None) -> Counter[str]:
        batch = images(b, seed, data)
        model = network(activation, batch.inputs.shape[1], [m], seed)
        rate = client.rate if isinstance(client, FedAvg) else 0.1
        updates = simulate.play_rounds(model, client, [batch] * count, rate=rate)
        return counted(join(updates, model, float("inf")).audited, batch)

    return attack


def output_layer(b: int, classes: int) -> Attack:
    """Return a client that trains only an output layer, on rectified random features."""

    def attack(seed: int, data: str | None) -> Counter[str]:
        del data
        torch.manual_seed(seed)
        batch = simulate.random_batch(b, features=200, generator=torch.Generator().manual_seed(seed))
        batch = Batch(batch.inputs.relu(), torch.randint(classes, (b,)), batch.normalisation)
        model = nn.Sequential(nn.Linear(200, classes))
        return audited(FedSGD()(model, batch), model, batch)

    return attack


def pictures(b: int) -> Attack:
    """Return a client with a small convolutional network."""

    def attack(seed: int, data: str | None) -> Counter[str]:
        del data
        torch.manual_seed(seed)
        batch = simulate.digits(b, generator=torch.Generator().manual_seed(seed))
        first = (nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
        model = nn.Sequential(*first, nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 10))
        return audited(FedSGD()(model, batch), model, batch)

    return attack


CLIENTS: dict[str, Attack] = {
    "ReLU, one hidden layer, b = 55": fresh("relu", 55, hidden=1),
    "ReLU, raw pixels, one hidden layer, b = 30": fresh("relu", 30, hidden=1, raw=True),
    "ReLU, b = 85": fresh("relu", 85),
    "ReLU, raw pixels, b = 60": fresh("relu", 60, raw=True),
    "ReLU, trained, b = 12": trained("relu", 12),
    "ReLU, photographs, b = 32": photographs(32, FedSGD()),
    "ReLU, FedAvg, b = 20": fresh("relu", 20, hidden=2, client=FedAvg(epochs=3, mini_batch=5, rate=0.01)),
    "ReLU, FedAvg with momentum and weight decay, b = 12": fresh(
        "relu", 12, hidden=1, client=FedAvg(epochs=2, mini_batch=6, rate=0.003, momentum=0.9, weight_decay=5e-4)
    ),
    "ReLU, noise 1e-5, b = 20": fresh("relu", 20, client=DPSGD(clip=1e9, noise=1e-5)),
    "ReLU, float16, b = 40": fresh("relu", 40, client=FedSGD() | Cast(torch.float16)),
    "ReLU, 8 bits, b = 20": fresh("relu", 20, client=FedSGD() | Quantise(8)),
    "ReLU, no model, b = 20": fresh("relu", 20, known=False),
    "ReLU by the equations, b = 40": by_equations(40),
    "ReLU by the equations, raw pixels, b = 30": by_equations(30, raw=True),
    "GELU, b = 60": fresh("gelu", 60),
    "GELU, one hidden layer, b = 60": fresh("gelu", 60, hidden=1),
    "tanh, b = 60": fresh("tanh", 60),
    "LeakyReLU, b = 40": fresh("leaky_relu", 40),
    "GELU, trained, b = 20": trained("gelu", 20),
    "GELU, noise 1e-5, b = 10": fresh("gelu", 10, m=100, client=DPSGD(clip=1e9, noise=1e-5)),
    "GELU, float16, b = 20": fresh("gelu", 20, client=FedSGD() | Cast(torch.float16)),
    "GELU, FedAvg, b = 6": fresh("gelu", 6, m=60, client=FedAvg(epochs=2, mini_batch=3, rate=0.01)),
    "GELU, no model, b = 10": fresh("gelu", 10, known=False),
    "output layer of 100 classes, b = 30": output_layer(30, 100),
    "ReLU, three rounds, b = 40": rounds("relu", 40, 100, 3, FedSGD()),
    "ReLU, six rounds of FedAvg, b = 50": rounds("relu", 50, 80, 6, FedAvg(epochs=1, mini_batch=25, rate=0.01)),
    "GELU, four rounds, b = 60": rounds("gelu", 60, 60, 4, FedSGD()),
    "pictures through a convolution, b = 4": pictures(4),
}
"""Clients by name."""
EMBEDDINGS = ("sgd", "adam", "adamw")
"""Optimisers of the clients with an embedding table."""


def audited(update: ClientUpdate, model: nn.Module | None, batch: Batch, *, told: bool = True) -> Counter[str]:
    """Audit an update with or without the number of samples, and count its claims."""
    result = spearpp.audit(update, model, batch_size=len(batch.inputs) if told else None)
    counts = counted(result.best, batch)
    counts["steps"] = sum(each.inversion.stats.steps for each in result.layers if each.inversion is not None)
    return counts


def counted(found: LayerAudit | None, batch: Batch) -> Counter[str]:
    """Count the claims of a layer, and how many of them are wrong."""
    counts = Counter(recovered=0, wrong=0, steps=0)
    if found is None or found.inversion is None:
        return counts
    claims = [each for each in found.claims if each.recovered]
    counts["recovered"], counts["steps"] = len(claims), found.inversion.stats.steps
    truth = batch.inputs.double()
    if claims and found.inputs.shape[1:] == truth.shape[1:]:
        apart = torch.cdist(found.inputs.double(), truth) / torch.linalg.vector_norm(truth, dim=1)
        stated = torch.tensor([each.error for each in claims], dtype=torch.float64)
        counts["wrong"] = int((apart.amin(1) > (3 * stated).clamp_min(hostile.ROUNDING)).sum())
    return counts


def table(optimiser: str, seed: int) -> Counter[str]:
    """Audit an embedding table, and count its rows."""
    update, model, truth = embedding_client(OPTIMISERS[optimiser], torch.float32, seed)
    named = set(audit_vocabulary(update, find_tables(model, update))[0].used)
    return Counter(recovered=len(named & truth), wrong=len(named - truth), steps=0)


def family(name: str, seed: int) -> Counter[str]:
    """Audit an update of a hostile family, and count its claims."""
    _, _, counts, _ = hostile.run((name, seed, None))
    recovered = sum(counts[each] for each in ("certified", "close", "merged"))
    wrong = sum(counts[each] for each in hostile.FAULTS)
    return Counter(recovered=recovered, wrong=wrong, steps=0, crashes=counts["crashes"])


def clients(data: str | None, families: int, first: int) -> dict[str, Callable[[], Counter[str]]]:
    """Return what audits each client, by its name."""
    work: dict[str, Callable[[], Counter[str]]] = {}
    work |= {name: partial(attack, first, data) for name, attack in CLIENTS.items()}
    work |= {f"embeddings, {name}": partial(table, name, first) for name in EMBEDDINGS}
    for seed in range(first, first + families):
        work |= {f"{name}, {seed}": partial(family, name, seed) for name in FAMILIES if name not in SLOW}
    return work


def measure(work: dict[str, Callable[[], Counter[str]]], names: Iterable[str]) -> dict[str, Counter[str]]:
    """Audit the named clients, and return the counts of each. An error counts as a crash."""
    found = {}
    for name in names:
        try:
            found[name] = work[name]()
        except Exception:
            found[name] = Counter(recovered=0, wrong=0, steps=0, crashes=1)
    return found


def recorded(attack: Callable[[], Counter[str]]) -> tuple[Counter[str], set[CodeType]]:
    """Audit a client, and record the code of all functions that were called."""
    called: set[CodeType] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(record)
    try:
        return attack(), called
    finally:
        sys.setprofile(None)
