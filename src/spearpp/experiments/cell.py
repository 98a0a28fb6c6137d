"""A cell: one setting, one seed. What is measured, stored and sent to workers."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from spearpp.errors import DataError
from spearpp.experiments.codec import canonical, decode, encode
from spearpp.experiments.version import code_version

FIRST_SEED = 1000


@runtime_checkable
class Setting(Protocol):
    """A frozen dataclass that the codec knows and that can be measured."""

    def measure(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Plain JSON; the same for the same seed, but for times."""
        ...


@dataclass(frozen=True)
class Cell:
    """A setting with a seed.

    >>> from spearpp.experiments.attack import Attack
    >>> cell = Cell(Attack(b=4, m=60), 1000)
    >>> Cell.from_json(cell.to_json()) == cell
    True
    """

    setting: Setting
    seed: int

    @cached_property
    def identity(self) -> str:
        """The setting's canonical JSON, without the places of files."""
        return canonical(self.setting)

    @property
    def key(self) -> str:
        """The content hash: SHA-256 of setting, seed and code version."""
        return key_of(self.identity, self.seed, code_version())

    def to_json(self) -> str:
        """For a worker: with the places of files."""
        return json.dumps({"setting": encode(self.setting), "seed": self.seed})

    @classmethod
    def from_json(cls, text: str) -> "Cell":
        """The cell that ``to_json`` wrote."""
        try:
            read = json.loads(text)
            return cls(decode(read["setting"]), int(read["seed"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"no cell: {text[:80]}") from error

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Do the work."""
        return self.setting.measure(self.seed, device)


def key_of(identity: str, seed: int, code: str) -> str:
    """The content hash of a cell.

    >>> key_of("{}", 1, "a") == key_of("{}", 1, "b")
    False
    """
    text = json.dumps({"code": code, "seed": seed, "setting": identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cells_of(setting: Setting, count: int) -> list[Cell]:
    """One cell for each of so many seeds, from 1000 on."""
    return [Cell(setting, seed) for seed in range(FIRST_SEED, FIRST_SEED + count)]
