"""Local training in the coordinates of a layer, with an unknown order of the mini-batches.

A FedAvg client visits every sample once in each epoch, and every visit moves the weights. The order of the visits is
unknown, so it is described by numbers: **mixing** c_ij is the share of sample j's step of an epoch that sample i has
already seen when it is visited in the same epoch. For a known order it is 0 or 1 in each epoch. Its mean over the
epochs is what the update depends on to first order in the movement of the weights, and this mean may be any number.
Sample i sees in epoch e the weights

    W_l - Σ_j κ_j (Σ_{e' < e} d_je' y_je'ᵀ + c_ij d_je y_jeᵀ)

with the inputs y and the signals d of every layer l, and κ_j = learning rate over the size of the mini-batch. The
movement is a sum of a few outer products, so the weights of a visit are never formed.

**The order from the mixing.** In epoch e sample i is in the mini-batch number t_ei. Summed over the epochs, the mixing
of two samples is the number of epochs in which j comes before i. A fit gives these numbers up to an error. Markov
chains find the mini-batches that explain them best: each step draws the mini-batch of one sample in one epoch, given
all others, and the temperature falls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import grad, jvp, vmap
from torch.nn import functional

from spearpp.linalg.time_limit import check_time
from spearpp.types import Float, Int, Tensor

CONSISTENCY_PASSES = 5
"""Number of passes through an epoch that make its visits consistent with each other. Derived: S passes are exact for S
mini-batches. Without a known order, each further pass changes the visits by a twentieth of the previous change."""
MARKOV_CHAINS = 96
"""Number of Markov chains that run at the same time. Design choice: they take hardly longer than a few."""
DRAWS_PER_SAMPLE = 80
"""Number of draws for each sample in each epoch. Measured: with 60, single samples had their mini-batches of two epochs
exchanged."""
FIRST_TEMPERATURE, LAST_TEMPERATURE = 3.0, 0.05
"""First and last temperature of the Markov chains. Design choice: from the change of a wrong step of a single pair to
far below it."""
MAX_BATCHES = 12
"""Largest number of mini-batches in an epoch. Design choice: beyond it, single positions are below the error of the
mixing."""


@dataclass(frozen=True, eq=False)
class Visits:
    """Signals and inputs of every layer, one row for each visit of a sample."""

    signals: list[Tensor]
    """[visits, m] for a layer with m neurons."""
    inputs: list[Tensor]
    """[visits, n] for a layer with n inputs, with an appended 1 if the layer has a bias. The inputs of the first layer
    are coordinates."""


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """Training of a chain of Linear layers and activations with cross-entropy, on samples with known labels."""

    weights: list[Tensor]
    """The weights before the training, with the bias as the last column if there is one. The columns of the first layer
    are coordinates."""
    biased: list[bool]
    """Which layers have a bias. The first entry is not used, because coordinates include it."""
    activations: list[Callable[[Tensor], Tensor]]
    """What follows each layer but the last one."""
    labels: Int[Tensor, "b"]
    passes: int = CONSISTENCY_PASSES

    def run(
        self, points: Float[Tensor, "b r"], sizes: Float[Tensor, "e b"], mixing: Float[Tensor, "e b b"]
    ) -> list[Visits]:
        """Return the visits of each epoch.

        Args:
            points: coordinates of the samples.
            sizes: κ of each sample in each epoch.
            mixing: c of each pair of samples in each epoch.
        """
        found: list[Visits] = []
        past: _Moved | None = None
        for size, mixed in zip(sizes, mixing, strict=True):
            now = self._visit(points, past, None)
            for _ in range(self.passes - 1):
                now = self._visit(points, past, (now, mixed * size))
            found.append(now)
            past = _later(past, now, size)
        return found

    def tangents(
        self,
        points: Float[Tensor, "b r"],
        sizes: Float[Tensor, "e b"],
        mixing: Float[Tensor, "e b b"],
        epochs: list[Visits],
        directions: Float[Tensor, "u r"],
        *,
        any_mixing: bool,
    ) -> list[Visits]:
        """Return, for each epoch, how the visits of every sample change with its coordinates and with its mixing.

        The changes have a leading dimension: one entry for each direction of the coordinates, and, with ``any_mixing``,
        one for each sample that is mixed in. The effect of a change on the visits of other samples is left out.
        """
        unknowns = directions, directions.new_zeros(len(directions), len(points))
        if any_mixing:
            axes = torch.eye(len(points), dtype=points.dtype, device=points.device)
            unknowns = torch.cat([directions, torch.zeros_like(points)]), torch.cat([unknowns[1], axes])
        found = []
        past: _Moved | None = None
        for now, size, mixed in zip(epochs, sizes, mixing, strict=True):

            def visit(
                p: Tensor, c: Tensor, past: _Moved | None = past, now: Visits = now, size: Tensor = size
            ) -> list[list[Tensor]]:
                each = self._visit(p, past, (now, c * size))
                return [each.signals, each.inputs]

            def along(p: Tensor, c: Tensor, visit: Any = visit, mixed: Tensor = mixed) -> list[list[Tensor]]:
                return jvp(visit, (points, mixed), (p.expand_as(points), c.expand_as(mixed)))[1]

            found.append(Visits(*vmap(along)(*unknowns)))
            past = _later(past, now, size)
        return found

    def _visit(self, points: Tensor, past: "_Moved | None", now: "_Moved | None") -> Visits:
        """Visit all samples once, given the movements of earlier epochs and of the same epoch."""
        moved = [each for each in (past, now) if each is not None]
        inputs, outputs = [], []
        vector = points
        for layer, weight in enumerate(self.weights):
            if layer and self.biased[layer]:
                vector = torch.cat([vector, torch.ones_like(vector[:, :1])], dim=1)
            output = vector @ weight.T
            for visits, sizes in moved:
                output = output - (sizes * (vector @ visits.inputs[layer].T)) @ visits.signals[layer]
            inputs.append(vector)
            outputs.append(output)
            if layer < len(self.activations):
                vector = self.activations[layer](output)
        signal = outputs[-1].softmax(1) - functional.one_hot(self.labels, outputs[-1].shape[1]).to(outputs[-1])
        signals = [signal]
        for layer in range(len(self.weights) - 1, 0, -1):
            sent = signal @ self.weights[layer]
            for visits, sizes in moved:
                sent = sent - (sizes * (signal @ visits.signals[layer].T)) @ visits.inputs[layer]
            slope = _slope(self.activations[layer - 1], outputs[layer - 1])
            signal = slope * sent[:, : slope.shape[1]]
            signals.insert(0, signal)
        return Visits(signals, inputs)


_Moved = tuple[Visits, Tensor]
"""Visits that moved the weights, and κ times the share of each that counts."""


def _later(past: _Moved | None, now: Visits, sizes: Tensor) -> _Moved:
    """Return the movements after another epoch."""
    if past is None:
        return now, sizes
    before, known = past
    signals = [torch.cat(pair) for pair in zip(before.signals, now.signals, strict=True)]
    inputs = [torch.cat(pair) for pair in zip(before.inputs, now.inputs, strict=True)]
    return Visits(signals, inputs), torch.cat([known, sizes])


def _slope(activation: Callable[[Tensor], Tensor], argument: Tensor) -> Tensor:
    return grad(lambda each: activation(each).sum())(argument)


def number_of_batches(mixing: Float[Tensor, "b b"]) -> int:
    """Return the number of mini-batches in an epoch, from the mean mixing of different samples.

    Of all ordered pairs of b samples in S equal mini-batches, b² (1 - 1/S) / 2 have the second sample before the first.

    >>> mixing = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    >>> number_of_batches(mixing)
    2
    """
    b = len(mixing)
    share = 2 * float(mixing.sum() - mixing.diagonal().sum()) / b**2
    return max(1, min(b, MAX_BATCHES, round(1 / max(1 - share, 1 / MAX_BATCHES))))


def mixing_of(batches: Int[Tensor, "e b"]) -> Float[Tensor, "e b b"]:
    """Return the mixing of known mini-batches in each epoch."""
    return (batches[:, :, None] > batches[:, None, :]).double()


def likely_orders(
    mixing: Float[Tensor, "b b"], epochs: int, count: int, most: int, generator: torch.Generator
) -> list[Int[Tensor, "e b"]]:
    """Return the mini-batches of every sample in each epoch that explain the mixing best, best first.

    The order of the epochs is arbitrary, because the mixing does not depend on it.

    Args:
        mixing: the mean mixing of all epochs.
        epochs: number of epochs.
        count: number of mini-batches in an epoch.
        most: largest number of orders that are returned.
        generator: source of randomness, on the CPU.

    >>> order = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])
    >>> found = likely_orders(mixing_of(order).mean(0), 2, 3, 1, torch.Generator().manual_seed(0))[0]
    >>> bool(torch.equal(mixing_of(found).sum(0), mixing_of(order).sum(0)))
    True
    """
    b = len(mixing)
    before = (epochs * mixing).float().cpu()
    batches = torch.randint(count, (MARKOV_CHAINS, epochs, b), generator=generator)
    numbers = torch.arange(count)[None, :, None]
    others = 1 - torch.eye(b)
    counts = (batches[:, :, :, None] > batches[:, :, None, :]).sum(1).float()
    for sweep in range(DRAWS_PER_SAMPLE):
        check_time()
        temperature = FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (sweep / (DRAWS_PER_SAMPLE - 1))
        for place in torch.randperm(epochs * b, generator=generator).tolist():
            epoch, sample = divmod(place, b)
            own, epoch_batches = batches[:, epoch, sample, None], batches[:, epoch]
            row = counts[:, sample] - (own > epoch_batches).float()
            column = counts[:, :, sample] - (epoch_batches > own).float()
            after = row[:, None] + (numbers > epoch_batches[:, None]).float() - before[sample]
            ahead = column[:, None] + (epoch_batches[:, None] > numbers).float() - before[:, sample]
            cost = ((after.square() + ahead.square()) * others[sample]).sum(2)
            drawn = torch.multinomial(torch.softmax(-cost / temperature, dim=1), 1, generator=generator)
            batches[:, epoch, sample] = drawn[:, 0]
            counts[:, sample] = (row + (drawn > epoch_batches).float()) * others[sample]
            counts[:, :, sample] = (column + (epoch_batches > drawn).float()) * others[sample]
    cost = ((counts - before) * others).square().sum((1, 2))
    found: dict[str, Tensor] = {}
    for chain in cost.argsort().tolist():
        ordered = sorted(batches[chain].tolist())
        found.setdefault(str(ordered), torch.tensor(ordered))
    return list(found.values())[:most]
