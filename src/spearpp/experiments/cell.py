"""A cell: one setting with one seed. Cells are the unit that is measured, stored and sent to workers."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from spearpp.experiments.codec import canonical
from spearpp.experiments.version import code_version

FIRST_SEED = 1000
"""Seed of the first cell of a setting. Any fixed number would do; stored results depend on it."""


@runtime_checkable
class Setting(Protocol):
    """What can be measured: a frozen dataclass that is registered with the codec."""

    def measure(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Return the result as JSON values. It depends only on the seed, except for durations."""
        ...


@dataclass(frozen=True)
class Cell:
    """A setting with a seed.

    >>> from spearpp.experiments.attack import Attack
    >>> Cell(Attack(b=4, m=60), 1000).measure(torch.device("cpu"))["certified"]
    4
    """

    setting: Setting
    seed: int

    @cached_property
    def identity(self) -> str:
        """Canonical JSON of the setting, without file paths."""
        return canonical(self.setting)

    @property
    def key(self) -> str:
        """Key of the cell in a store: SHA-256 of setting, seed and code version."""
        return key_of(self.identity, self.seed, code_version())

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Measure the setting with the seed on a device."""
        return self.setting.measure(self.seed, device)


def key_of(identity: str, seed: int, code: str) -> str:
    """Return the key of a cell: a hash of its setting, its seed and the code version.

    >>> key_of("{}", 1, "a") == key_of("{}", 1, "b")
    False
    """
    text = json.dumps({"code": code, "seed": seed, "setting": identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cells_of(setting: Setting, count: int) -> list[Cell]:
    """Return ``count`` cells of a setting, with the seeds 1000, 1001, ...

    >>> from spearpp.experiments.attack import Attack
    >>> [cell.seed for cell in cells_of(Attack(b=4, m=60), 2)]
    [1000, 1001]
    """
    return [Cell(setting, seed) for seed in range(FIRST_SEED, FIRST_SEED + count)]
