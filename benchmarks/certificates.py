"""Counts certified inputs and wrong certificates on several data sets. Fails if a certificate is wrong.

    make bench NAME=certificates

A certified input is wrong if its PSNR to the true input it is matched to is below 60 dB. An input is missed if its PSNR
is above 90 dB and it is not certified.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import nn

import spearpp
from spearpp import simulate
from spearpp.errors import RankError
from spearpp.experiments.attack import measurement
from spearpp.search import Gated
from spearpp.simulate import Batch, LayerGradient

Case = Callable[[torch.Generator], tuple[torch.Tensor, LayerGradient]]
"""Returns the true inputs of a layer, and the gradients that the server receives."""


def plain(load: Callable[..., Batch], b: int, m: int, **options: object) -> Case:
    """Return the case of one data set and a fresh network."""

    def case(generator: torch.Generator) -> tuple[torch.Tensor, LayerGradient]:
        batch = load(b, generator=generator, **options)
        model = simulate.mlp(batch.inputs.shape[1], [m, m, m], 10, generator=generator)
        return batch.inputs, simulate.fedsgd(model, batch)[0]

    return case


def table(generator: torch.Generator) -> tuple[torch.Tensor, LayerGradient]:
    """A table with three one-hot groups, a constant column and six numeric columns."""
    groups = [torch.eye(k)[torch.randint(k, (10,), generator=generator)] for k in (5, 7, 3)]
    inputs = torch.cat([*groups, torch.ones(10, 1), torch.rand(10, 6, generator=generator)], dim=1)
    labels = torch.randint(2, (10,), generator=generator)
    batch = Batch(inputs, labels, spearpp.Normalisation.identity(inputs.shape[1]))
    return inputs, simulate.fedsgd(simulate.mlp(inputs.shape[1], [256, 64], 2, generator=generator), batch)[0]


def trained(generator: torch.Generator) -> tuple[torch.Tensor, LayerGradient]:
    """A network after 100 steps of SGD: samples with a small loss have small gradients."""
    model = simulate.mlp(64, [200, 200], 10, generator=generator)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        seen = simulate.digits(64, generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(seen.inputs), seen.labels).backward()
        optimiser.step()
    batch = simulate.digits(16, generator=generator)
    return batch.inputs, simulate.fedsgd(model, batch)[0]


def weighted(generator: torch.Generator) -> tuple[torch.Tensor, LayerGradient]:
    """A loss with class weights from 1e-3 to 1."""
    batch = simulate.random_batch(12, features=60, generator=generator)
    model = simulate.mlp(60, [150, 100], 10, generator=generator)
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels, weight=torch.logspace(-3, 0, 10))
    weight, bias = list(model.parameters())[:2]
    gradients = torch.autograd.grad(loss, [weight, bias])
    return batch.inputs, LayerGradient(gradients[0], gradients[1], weight.detach(), bias.detach())


def inner(generator: torch.Generator) -> tuple[torch.Tensor, LayerGradient]:
    """The second layer of a network. Its inputs are features, of which half are zero."""
    batch = simulate.random_batch(16, features=80, generator=generator)
    model = simulate.mlp(80, [120, 200, 100], 10, generator=generator)
    return model[:2](batch.inputs).detach(), simulate.fedsgd(model, batch)[1]


def half(generator: torch.Generator) -> tuple[torch.Tensor, LayerGradient]:
    """Gradients that are sent as float16."""
    inputs, seen = plain(simulate.photographs, 16, 200)(generator)
    assert seen.grad_bias is not None
    return inputs, seen._replace(grad_weight=seen.grad_weight.half(), grad_bias=seen.grad_bias.half())


CASES: dict[str, Case] = {
    "photographs, b=24, m=200": plain(simulate.photographs, 24, 200),
    "photographs, raw pixels, b=12, m=200": plain(simulate.photographs, 12, 200, normalise=False),
    "digits, b=20, m=200": plain(simulate.digits, 20, 200),
    "breast cancer, b=16, m=200": plain(simulate.breast_cancer, 16, 200),
    "random, n=20 < m, b=12, m=64": plain(simulate.random_batch, 12, 64, features=20),
    "random, b=40, m=512": plain(simulate.random_batch, 40, 512, features=100),
    "one-hot table, b=10, m=256": table,
    "trained network, digits, b=16": trained,
    "class weights 1e-3 to 1, b=12": weighted,
    "inner layer, b=16": inner,
    "float16 wire, b=16": half,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    print(f"{'setting':<40}{'inputs':>8}{'recovered':>11}{'certified':>11}{'wrong':>7}{'missed':>8}")
    sums = [0] * 5
    for name, case in CASES.items():
        counts = [0] * 5
        for seed in range(options.batches):
            truth, seen = case(torch.Generator().manual_seed(seed))
            try:
                result = spearpp.invert(*seen, search=Gated(starts=2048))
            except RankError:
                counts[0] += len(truth)
                continue
            found = measurement(len(truth), result, spearpp.score(result.inputs, truth), result.certified, 0.0, "")
            new = (found.b, found.recovered, found.certified, found.wrongly_certified, found.missed)
            counts = [a + b for a, b in zip(counts, new, strict=True)]
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        print(f"{name:<40}{counts[0]:>8}{counts[1]:>11}{counts[2]:>11}{counts[3]:>7}{counts[4]:>8}", flush=True)
    print(f"{'all':<40}{sums[0]:>8}{sums[1]:>11}{sums[2]:>11}{sums[3]:>7}{sums[4]:>8}")
    return 1 if sums[3] else 0


if __name__ == "__main__":
    sys.exit(main())
