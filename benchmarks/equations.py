"""Measures how many batches the equations of the network recover, by activation, width and batch size.

    make bench NAME=equations                                          # all rows of networks with 200 neurons a layer
    make bench NAME=equations ARGS="--rows gelu120 gelu140 --batches 10"
    make bench NAME=equations ARGS="--rows m1000 m4000 --device cuda"  # H200
    make bench NAME=equations ARGS="--rows trained sure"               # networks after 25 epochs of SGD, and of Adam
    make bench NAME=equations ARGS="--rows relu raw relu500 relu1000"  # ReLU: both searches, and the audit
    make bench NAME=equations ARGS="--rows speed"                      # time in SVDs of the gradient
    make bench NAME=equations ARGS="--rows encoder"                    # tokens of an encoder layer

The data are CIFAR-10 test images (SPEARPP_DATA). Each batch has its own seed (1000, 1001, ...) and a fresh
3072-m-…-m-10 network, unless the row says otherwise. Gradients are float32. A batch is exact if all its inputs are
certified. An input is approximate if its evidence holds with a stated error between 1e-3 and 0.1. A certified or
approximate input is wrong if it is farther than three times its stated error from every sample. "Determined" counts
samples that are certified if the search starts at the truth, and "accurate" those of which this start gives an input
with a true error of at most 1e-3; both are measured for trained networks. The last column is the time over that of the
float64 singular values of the first layer's gradient, measured after each batch.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import spearpp
from benchmarks import command
from spearpp import ClientUpdate, simulate
from spearpp.auditing.claims import MAX_ERROR
from spearpp.errors import RankError
from spearpp.inversion.evidence import EXACT
from spearpp.inversion.problem import Problem
from spearpp.inversion.result import Inversion
from spearpp.inversion.solutions import no_solutions
from spearpp.model.following import ACTIVATIONS, Following
from spearpp.search import Equations
from spearpp.search.base import Proposals
from spearpp.search.equations.finish import Finish
from spearpp.simulate import Batch, FedSGD
from spearpp.types import LayerTensors

MODEL_WIDTH, FEED_FORWARD = 192, 768
"""Sizes of the encoder layer."""
EPOCHS = 25
"""Number of epochs of the trained networks."""
OPTIMISERS = {"sgd": (torch.optim.SGD, 0.05, 32), "adam": (torch.optim.Adam, 1e-3, 128)}
"""Optimisers of the trained networks by name, with learning rate and batch size. Measured with ReLU: SGD ends at an
accuracy of 90 % on the training images, and Adam at 98 %."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    activation: str
    m: int
    b: int
    batches: int
    hidden: int = 3
    raw: bool = False
    trained: str = ""
    """The optimiser of a trained network; an empty string for a fresh network."""
    seconds: float = 60.0
    search: str = "equations"
    """What runs: "equations", "gated" (with the gradients of two layers), or "audit" (the whole audit). The last two
    are for ReLU only."""


@dataclass(frozen=True)
class Row:
    """What one setting gave."""

    activation: str
    search: str
    m: int
    hidden: int
    b: int
    data: str
    batches: int
    exact: int
    """Batches of which every visible sample is certified."""
    visible: int
    """Samples that the gradients show."""
    determined: int
    """Samples that are certified if the search starts at the true samples. Counted for trained networks only: noise
    hides the others."""
    accurate: int
    """Samples whose input has a true error of at most 1e-3 if the search starts at the true samples. Counted like
    ``determined``. The stated error of such an input may be larger."""
    certified: int
    approximate: int
    wrong: int
    starts: float
    """Mean number of starts of a batch."""
    seconds: float
    """Median time of a batch."""
    svds: float
    """Median of the time of a batch over that of the float64 singular values of its gradient."""


def each(m: int, b: int, batches: int, **options: Any) -> list[Setting]:
    """Return a setting with ReLU three times: with the gated search, with the equations, and with the whole audit."""
    return [Setting("relu", m, b, batches, **options, search=search) for search in ("gated", "equations", "audit")]


SMOOTH = ("gelu", "silu", "elu", "softplus", "leaky_relu", "tanh")
ROWS: dict[str, list[Setting]] = {
    **{name: [Setting(name, 200, b, 50) for b in (20, 60, 90)] for name in SMOOTH},
    "sigmoid": [Setting("sigmoid", 200, 20, 50)],
    "gelu120": [Setting("gelu", 200, 120, 50)],
    "gelu140": [Setting("gelu", 200, 140, 50)],
    "onelayer": [Setting("gelu", 200, b, 50, hidden=1) for b in (60, 90)],
    "relu": [setting for b in (20, 40, 60, 80, 90) for setting in each(200, b, 20)],
    "raw": [setting for b in (20, 40, 60, 80) for setting in each(200, b, 20, raw=True)],
    "relu500": [setting for b in (200, 225) for setting in each(500, b, 5, seconds=300.0)],
    "relu1000": [setting for b in (300, 450) for setting in each(1000, b, 2, seconds=600.0)],
    "m1000": [Setting("gelu", 1000, b, 10) for b in (300, 450, 600)],
    "m4000": [Setting("gelu", 4000, b, n, seconds=300.0) for b, n in ((400, 5), (1200, 3), (2200, 1))],
    "speed": [Setting("gelu", m, b, 5) for m, b in ((200, 20), (200, 40), (200, 80), (400, 40), (800, 40))],
    "encoder": [Setting("encoder", FEED_FORWARD, 130, 3, hidden=1, seconds=300.0)],
    "trained": [Setting(name, 200, b, 10, trained="sgd") for name in ("relu", "gelu") for b in (20, 40, 60, 80)],
    "sure": [Setting(name, 200, b, 10, trained="adam") for name in ("relu", "gelu") for b in (20, 40, 60, 80)],
    "trainedrelu": [setting for b in (20, 40, 60, 80) for setting in each(200, b, 10, trained="sgd")],
}
"""Blocks of rows by name."""
LARGE = ("m1000", "m4000")
"""Blocks that take a GPU."""


def network(activation: str, features: int, hidden: list[int], seed: int) -> nn.Sequential:
    """Return a fresh network with hidden layers of these widths and ten outputs."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([features, *hidden]):
        layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 10))


@cache
def trained(setting: Setting, data: str | None, device: torch.device) -> nn.Sequential:
    """Return a network after training on all images."""
    images = simulate.cifar10(10_000, path=data)
    inputs, labels = images.inputs.to(device), images.labels.to(device)
    model = network(setting.activation, inputs.shape[1], [setting.m] * setting.hidden, 0).to(device)
    kind, rate, batch_size = OPTIMISERS[setting.trained]
    optimiser = kind(model.parameters(), rate)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), device=device).split(batch_size):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    accuracy = float((model(inputs).argmax(1) == labels).float().mean())
    print(f"# {setting.activation}, {setting.trained}: {accuracy:.1%} accuracy after {EPOCHS} epochs", flush=True)
    return model


@dataclass(frozen=True)
class Attacked:
    """What one batch gave."""

    batch: Batch
    result: Inversion
    seconds: float
    svd: float
    """Seconds of the singular values of the gradient."""
    determined: int
    accurate: int


@dataclass(frozen=True, eq=False)
class FromTruth(Equations):
    """Solve the equations from the true samples."""

    batch: Batch = field(kw_only=True)

    def propose(self, problem: Problem, generator: torch.Generator, deadline: float) -> Iterator[Proposals]:
        """Propose the true samples that satisfy the equations."""
        assert problem.network is not None
        rows = problem.factors.right / problem.factors.singular_values[:, None]
        inputs = self.batch.inputs.to(rows)
        points = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1) @ rows.T
        found = Finish(problem, problem.network).new_samples(points, self.batch.labels, no_solutions(problem))
        yield Proposals(rows[:0, : problem.batch_size], len(points), 0, solutions=found)


def attack(setting: Setting, seed: int, data: str | None, device: torch.device) -> Attacked:
    """Recover one batch."""
    if setting.activation == "encoder":
        return encoder(setting, seed, device)
    generator = torch.Generator().manual_seed(seed)
    batch = simulate.cifar10(setting.b, path=data, normalise=not setting.raw, generator=generator)
    batch = Batch(batch.inputs.to(device), batch.labels.to(device), batch.normalisation)
    if setting.trained:
        model = trained(Setting(setting.activation, setting.m, 0, 0, trained=setting.trained), data, device)
    else:
        model = network(setting.activation, batch.inputs.shape[1], [setting.m] * setting.hidden, seed).to(device)
    first, *later = simulate.fedsgd(model, batch)
    following = Following.of_layers(setting.activation, later)
    size = None if setting.trained else setting.b
    options: dict[str, Any] = {"seconds": setting.seconds, "batch_size": size}
    if setting.search == "gated":
        options |= {"next_grad_weight": later[0][0], "next_weight": later[0][2]}
    elif setting.search == "equations":
        options |= {"following": following}
    else:
        update = FedSGD()(model, batch)
        return _timed(batch, first, partial(audited, update, model, setting.seconds, size), device)
    attacked = _timed(batch, first, partial(spearpp.invert, *first, **options), device)
    if not setting.trained:
        return attacked
    best = spearpp.invert(*first, following=following, search=FromTruth(batch=batch))
    accurate = int((distances(batch, best.inputs) <= EXACT).sum())
    return replace(attacked, determined=int(best.certified.sum()), accurate=accurate)


def audited(update: ClientUpdate, model: nn.Module, seconds: float, batch_size: int | None) -> Inversion:
    """Return the inversion of the first layer that an audit of the update reports."""
    best = spearpp.audit(update, model, budget=seconds, batch_size=batch_size).best
    if best is None or best.inversion is None:
        raise RankError("the audit inverted no layer")
    return best.inversion


def encoder(setting: Setting, seed: int, device: torch.device) -> Attacked:
    """Recover the features of the tokens of a fresh encoder layer: b tokens in sequences of 13."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(MODEL_WIDTH, 4, FEED_FORWARD, 0.0, "gelu", batch_first=True).to(device)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(13 * MODEL_WIDTH, 10).to(device))
    seen: list[torch.Tensor] = []
    layer.linear1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    sequences = torch.randn(setting.b // 13, 13, MODEL_WIDTH, device=device)
    labels = torch.randint(10, (len(sequences),), device=device)
    loss = nn.functional.cross_entropy(model(sequences), labels)
    tensors: list[LayerTensors] = []
    for each in (layer.linear1, layer.linear2):
        gradients = torch.autograd.grad(loss, [each.weight, each.bias], retain_graph=True)
        tensors.append((gradients[0], gradients[1], each.weight.detach(), each.bias.detach()))
    tokens = seen[0].reshape(-1, MODEL_WIDTH)
    scale = simulate.random_batch(1, features=MODEL_WIDTH).normalisation  # not used
    batch = Batch(tokens, torch.zeros(len(tokens), dtype=torch.long, device=device), scale)
    following = Following.of_layers("gelu", tensors[1:], loss=None)
    options: dict[str, Any] = {"following": following, "seconds": setting.seconds, "batch_size": setting.b}
    return _timed(batch, tensors[0], partial(spearpp.invert, *tensors[0], **options), device)


def _timed(batch: Batch, first: LayerTensors, invert: Callable[[], Inversion], device: torch.device) -> Attacked:
    """Measure one inversion, and the singular values of the first layer's gradient."""
    results: list[Inversion] = []
    seconds = command.seconds(lambda: results.append(invert()), device)
    svd = command.seconds(lambda: torch.linalg.svdvals(first[0].double()), device)
    visible = results[0].batch_size
    return Attacked(batch, results[0], seconds, svd, determined=visible, accurate=visible)


def distances(batch: Batch, inputs: torch.Tensor) -> torch.Tensor:
    """Return the distance of each input to the nearest sample, relative to the norm of that sample."""
    truth = batch.inputs.double()
    return (torch.cdist(inputs.double(), truth) / torch.linalg.vector_norm(truth, dim=1)).amin(1)


def wrong(batch: Batch, result: Inversion, which: torch.Tensor | None = None) -> int:
    """Count inputs, by default the certified ones, that are more than three stated errors away from every sample."""
    if result.evidence is None:
        return 0
    which = result.certified if which is None else which
    return int((distances(batch, result.inputs[which]) > 3 * result.evidence.error[which]).sum())


def approximate(result: Inversion) -> torch.Tensor:
    """Return which inputs are not certified, but have a stated error of at most 0.1."""
    if result.evidence is None:
        return torch.zeros_like(result.certified)
    return result.evidence.consistent & ~result.certified & (result.evidence.error <= MAX_ERROR)


def measure(setting: Setting, batches: int | None, first: int, data: str | None, device: torch.device) -> Row:
    """Attack all batches of a setting."""
    exact = visible = determined = accurate = certified = nearly = mistakes = starts = 0
    times, ratios = [], []
    count = batches or setting.batches
    for seed in range(first, first + count):
        try:
            attacked = attack(setting, seed, data, device)
        except RankError:  # the gradient does not show a rank below the width of the layer
            times.append(float("nan"))
            continue
        batch, result = attacked.batch, attacked.result
        found = int(result.certified.sum())
        determined, accurate = determined + attacked.determined, accurate + attacked.accurate
        exact += found == result.batch_size
        visible, certified, starts = visible + result.batch_size, certified + found, starts + result.stats.starts
        nearly, mistakes = nearly + int(approximate(result).sum()), mistakes + wrong(batch, result)
        mistakes += wrong(batch, result, approximate(result))
        times.append(attacked.seconds)
        ratios.append(attacked.seconds / attacked.svd)
    kind = f"trained, {setting.trained}" if setting.trained else "raw pixels" if setting.raw else "normalised"
    sizes = (setting.activation, setting.search, setting.m, setting.hidden, setting.b, kind, count)
    counts = (exact, visible, determined, accurate, certified, nearly, mistakes)
    return Row(*sizes, *counts, starts / count, statistics.median(times), statistics.median(ratios or [float("nan")]))


def main() -> int:
    """Measure the blocks that were asked for."""
    options = command.parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=ROWS, default=[each for each in ROWS if each not in LARGE])
    options.add_argument("--batches", type=int, help="number of batches of each row; default: as in the table")
    command.add_first(options)
    given = options.parse_args()
    settings = (setting for name in given.rows for setting in ROWS[name])
    rows = (measure(setting, given.batches, given.first, given.data, given.device) for setting in settings)
    return command.run(command.printed(rows), given.out)


if __name__ == "__main__":
    sys.exit(main())
