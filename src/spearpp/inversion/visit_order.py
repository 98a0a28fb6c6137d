"""The order of the mini-batches of local training, from the mixing of its samples.

In epoch e sample i is in the mini-batch number t_ei. Summed over the epochs, the mixing of two samples is the number of
epochs in which j comes before i (``spearpp.inversion.training``). A fit gives these numbers up to an error. Markov
chains find the mini-batches that explain them best: each step draws the mini-batch of one sample in one epoch, given
all others, and the temperature falls.
"""

import torch

from spearpp.linalg.time_limit import check_time
from spearpp.types import Float, Int, Tensor

CHAINS = 96
"""Number of Markov chains that run at the same time. Design choice: they take hardly longer than a few."""
SWEEPS = 80
"""Number of draws for each sample in each epoch. Measured: with 60, single samples had their mini-batches of two epochs
exchanged."""
HOTTEST, COLDEST = 3.0, 0.05
"""First and last temperature. Design choice: from the change of a wrong step of a single pair to far below it."""
MOST_BATCHES = 12
"""Largest number of mini-batches in an epoch. Design choice: beyond it, single positions are below the error of the
mixing."""


def number_of_batches(mixing: Float[Tensor, "b b"]) -> int:
    """Return the number of mini-batches in an epoch, from the mean mixing of different samples.

    Of all ordered pairs of b samples in S equal mini-batches, b² (1 - 1/S) / 2 have the second sample before the first.

    >>> mixing = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    >>> number_of_batches(mixing)
    2
    """
    b = len(mixing)
    share = 2 * float(mixing.sum() - mixing.diagonal().sum()) / b**2
    return max(1, min(b, MOST_BATCHES, round(1 / max(1 - share, 1 / MOST_BATCHES))))


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
    batches = torch.randint(count, (CHAINS, epochs, b), generator=generator)
    numbers = torch.arange(count)[None, :, None]
    others = 1 - torch.eye(b)
    counts = (batches[:, :, :, None] > batches[:, :, None, :]).sum(1).float()
    for sweep in range(SWEEPS):
        check_time()
        temperature = HOTTEST * (COLDEST / HOTTEST) ** (sweep / (SWEEPS - 1))
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
