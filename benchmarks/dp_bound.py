"""Measures two attacks on DP-SGD beside the bound that the stated noise implies. No honest row may exceed the bound.

    make bench NAME=dp_bound
    make bench NAME=dp_bound ARGS="--audits 1"

CIFAR-10 test images (SPEARPP_DATA), a 3072-100-100-10 network, gradients clipped to norm 1, noise multiplier σ.

- The audit sees one update and the model, as always. A sample counts if a recovered input has a PSNR over 25 dB.
- The informed attacker knows all samples but one, the clipping norm and ten candidates for that one (κ = 0.1). It
  subtracts what it knows and picks the candidate whose clipped gradient is nearest.

The last rows are clients that do not do what they state. The bound may be exceeded there. The last column says whether
the comparison of the statement with the update (``spearpp.dp.compare``) notices.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import spearpp
from benchmarks import command
from benchmarks.recovery import FIRST_SEED
from spearpp import AuditResult, ClientUpdate, simulate
from spearpp.dp import StatedDP, compare, probability
from spearpp.experiments.intervals import wilson
from spearpp.metrics import PAPER_NOISY_PSNR
from spearpp.simulate import DPSGD, Batch
from spearpp.types import Tensor

CLIP, CANDIDATES, SECONDS = 1.0, 10, 5.0
HONEST = [(sigma, b, 1.0, 1) for b in (1, 4, 16) for sigma in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0)]
OTHERS = [(sigma, 4, 0.3, 1) for sigma in (0.1, 0.3, 1.0)] + [(sigma, 4, 1.0, 4) for sigma in (0.6, 2.0, 6.0)]


@dataclass(frozen=True)
class Setting:
    """What a client states, and what it does instead."""

    sigma: float
    b: int
    rate: float = 1.0
    steps: int = 1
    real_noise: float = 1.0
    """The noise that the client adds, divided by the noise that it states."""
    real_clip: float = 1.0
    """The norm to which the client clips, divided by the norm that it states."""

    @property
    def honest(self) -> bool:
        """Whether the client does what it states."""
        return self.real_noise == self.real_clip == 1

    @property
    def stated(self) -> StatedDP:
        """What the client states."""
        return StatedDP(self.sigma, CLIP, self.rate, self.steps, 1 / CANDIDATES)

    @property
    def client(self) -> DPSGD:
        """What the client does."""
        return DPSGD(CLIP * self.real_clip, self.real_noise * self.sigma * CLIP / self.b)


@dataclass(frozen=True)
class Row:
    """The results of one setting."""

    sigma: float
    b: int
    rate: float
    steps: int
    real_noise: float
    real_clip: float
    bound: float
    audited: int
    recovered: int
    trials: int
    guessed: int
    warned: int
    comparisons: int

    @property
    def exceeds(self) -> bool:
        """Whether one of the two attacks succeeded more often than the bound and chance (95 %) allow."""
        pairs = ((self.recovered, self.audited), (self.guessed, self.trials))
        return any(count and wilson(hits, count).low > self.bound for hits, count in pairs)


def flat(update: ClientUpdate) -> Tensor:
    """Return all entries of an update as one vector."""
    return torch.cat([each.flatten() for each in update.gradients.values()])


def guess(setting: Setting, model: nn.Module, batch: Batch, trials: int) -> int:
    """Return how often the informed attacker picks the right candidate.

    After it subtracted the known samples, only the inner products of the update with the candidates matter. They are
    drawn with the covariance that independent noise on every entry gives them.
    """
    exact = DPSGD(CLIP * setting.real_clip, 0.0)
    gradients = torch.stack([flat(exact(model, batch.pick(slice(row, row + 1)))) for row in range(CANDIDATES)]).double()
    products = gradients @ gradients.T
    generator = torch.Generator().manual_seed(setting.b)
    target = torch.randint(CANDIDATES, (trials,), generator=generator)
    drawn = (torch.rand(trials, setting.steps, generator=generator) < setting.rate).sum(1).double()
    noise = torch.randn(trials, CANDIDATES, generator=generator).double() @ torch.linalg.cholesky(products).T
    seen = drawn[:, None] * products[target] + setting.b * setting.client.noise * setting.steps**0.5 * noise
    nearest = (2 * seen - setting.steps * products.diagonal()).argmax(1)
    return int((nearest == target).sum())


def audits(setting: Setting, batch: Batch, model: nn.Module, seed: int) -> tuple[AuditResult, ClientUpdate]:
    """Audit one update of the client."""
    update = setting.client(model, batch, torch.Generator().manual_seed(seed))
    return spearpp.audit(update, model, batch_size=setting.b, budget=SECONDS), update


def measure(setting: Setting, data: str | None, trials: int, count: int) -> Row:
    """Attack the updates of one client."""
    recovered = audited = warned = comparisons = 0
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        batch = simulate.cifar10(setting.b, path=data, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        model = simulate.mlp(batch.inputs.shape[1], [100, 100], 10)
        result, update = audits(setting, batch, model, seed)
        comparisons += 1
        warned += bool(compare(setting.stated, update, result, setting.b).warnings)
        if setting.rate == setting.steps == 1:
            audited += setting.b
            if len(result.inputs):
                score = spearpp.score(result.inputs, batch.inputs, normalisation=batch.normalisation)
                recovered += int((score.psnr > PAPER_NOISY_PSNR).sum())
    more = simulate.cifar10(CANDIDATES, path=data, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    guessed = guess(setting, simulate.mlp(more.inputs.shape[1], [100, 100], 10), more, trials)
    return Row(
        setting.sigma, setting.b, setting.rate, setting.steps, setting.real_noise, setting.real_clip,
        setting.stated.bound, audited, recovered, trials, guessed, warned, comparisons,
    )  # fmt: skip


def rows(data: str | None, trials: int, count: int) -> Iterator[Row]:
    """Measure every setting, and print each row."""
    settings = [Setting(*each) for each in [*HONEST, *OTHERS]]
    settings += [Setting(1.0, 4, real_noise=share) for share in (0.5, 0.1)]
    settings += [Setting(sigma, 4, real_clip=4.0) for sigma in (1.0, 0.001)]
    command.print_head("σ", "b", "rate", "steps", "client", "bound γ", "audit", "informed attacker", "noticed")
    for setting in settings:
        row = measure(setting, data, trials, count)
        lie = f"noise x {row.real_noise:g}" if row.real_noise != 1 else f"clips to {row.real_clip * CLIP:g}"
        audit = f"{row.recovered} of {row.audited}" if row.audited else "-"
        command.print_row(
            f"{row.sigma:g}", row.b, f"{row.rate:g}", row.steps, "honest" if setting.honest else lie,
            probability(row.bound), audit, f"{row.guessed / row.trials:.3f}", f"{row.warned} of {row.comparisons}",
        )  # fmt: skip
        if setting.honest and (row.exceeds or row.warned):
            raise SystemExit("an honest client exceeds its bound, or is warned about")
        yield row


def main() -> int:
    """Measure all settings."""
    options = command.parser(__doc__)
    options.add_argument("--trials", type=int, default=20_000, help="guesses of the informed attacker for each row")
    options.add_argument("--audits", type=int, default=3, help="audited updates for each row")
    given = options.parse_args()
    return command.run(rows(given.data, given.trials, given.audits), given.out)


if __name__ == "__main__":
    sys.exit(main())
