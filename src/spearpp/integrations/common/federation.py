"""What an integration knows of a federation: how clients train, names of reports, sampled updates, earlier rounds."""

import hashlib
import random
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spearpp.auditing.estimate import total_factor
from spearpp.errors import OptionError, SpearError
from spearpp.update import ClientUpdate

RATE = ("lr", "learningrate", "clientlr", "locallr")
STEPS = ("localsteps", "localepochs", "epochs", "numepochs", "numlocalepochs")
MOMENTUM = ("momentum", "clientmomentum", "sgdmomentum")
"""Names of the configuration values, without dashes, dots and underscores. The first one that is present is used."""
FOLDER = ".history"
"""Folder below the folder for reports that contains the rounds."""
MAX_AGE = 7 * 24 * 3600.0
"""Seconds after which a stored round is deleted: one week. Design choice: an update may contain personal data, so it
must not be kept without need."""


@dataclass(frozen=True)
class Training:
    """Learning rate, number of passes over the data and momentum of a client. None means unknown.

    An inversion does not need these values. The audit also estimates them from the update itself (``estimated``).

    >>> Training.of({"learning-rate": 0.1, "local_epochs": 3})
    Training(lr=0.1, steps=3, momentum=None)
    """

    lr: float | None = None
    steps: int | None = None
    momentum: float | None = None

    @classmethod
    def of(cls, *configs: Mapping[str, Any]) -> "Training":
        """Read the values from configurations. Earlier configurations take precedence. Invalid values are ignored."""
        values: dict[str, Any] = {}
        for config in configs:
            for name, value in config.items():
                values.setdefault("".join(c for c in str(name).lower() if c.isalnum()), value)
        lr, steps, momentum = (_first_number(values, names) for names in (RATE, STEPS, MOMENTUM))
        return cls(
            lr if lr is not None and 0 < lr < float("inf") else None,
            int(steps) if steps is not None and 1 <= steps < float("inf") and steps == int(steps) else None,
            momentum if momentum is not None and 0 <= momentum < 1 else None,
        )

    @property
    def rate(self) -> float | None:
        """The effective learning rate of one pass over the data. None if it is unknown.

        With momentum μ, the gradient of one step contributes to every later step. Over s steps the mean gradient is
        multiplied by lr · Σ_t (1 - μᵗ) / (1 - μ), t = 1 ... s. The rate is this factor divided by s, so the mean
        gradient is (before - after) / (rate · s). The first step equals a step of plain SGD. If s is unknown, momentum
        makes the rate unknown.

        >>> Training(lr=0.1, steps=1, momentum=0.9).rate, round(Training(lr=0.1, steps=2, momentum=0.5).rate, 3)
        (0.1, 0.125)
        """
        if self.lr is None or not self.momentum:
            return self.lr
        if self.steps is None:
            return None
        return self.lr * total_factor(self.steps, self.momentum) / self.steps


def _first_number(values: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """Return the first value under these names that is a number and not NaN."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            return value
    return None


@dataclass(frozen=True)
class Pseudonyms:
    """Pseudonyms of clients: a keyed hash, which only the holder of the salt can link to a client.

    The default salt is random and stays in memory, so pseudonyms are then valid for one run.

    >>> Pseudonyms("secret").of(17) == Pseudonyms("secret").of(17) != Pseudonyms("other").of(17)
    True
    """

    salt: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def of(self, client: object) -> str:
        """Return the pseudonym of a client."""
        key = hashlib.sha256(self.salt.encode()).digest()
        return "client-" + hashlib.blake2b(str(client).encode(), key=key, digest_size=6).hexdigest()


def round_name(number: int | None) -> str:
    """Return the folder name of a round.

    >>> round_name(7), round_name(None)
    ('round-0007', 'round-unknown')
    """
    return "round-unknown" if number is None else f"round-{number:04d}"


def round_number(name: str) -> int:
    """Return the round in the name of an audit, or 0 if the round is unknown.

    >>> round_number("round-0007/client-1f9c"), round_number("round-unknown/own")
    (7, 0)
    """
    number = name.split("/")[0].removeprefix("round-")
    return int(number) if number.isdecimal() else 0


@dataclass(frozen=True)
class RoundSampler:
    """Choose ``count`` random updates in every ``every``-th round.

    The choice depends only on the seed and the round. It does not change the global random state.

    >>> RoundSampler(count=2).among(1, ["a", "b", "c"]) == RoundSampler(count=2).among(1, ["a", "b", "c"])
    True
    >>> RoundSampler(every=2).among(1, ["a"]), RoundSampler(every=2).among(2, ["a"])
    ([], [0])
    """

    count: int | None = 1
    """Number of updates per round. None chooses all."""
    every: int = 1
    """Audit only rounds whose number, counted from 1, is a multiple of this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or (self.count is not None and self.count < 0):
            raise OptionError(f"sample={self.count}, every={self.every}: expected sample >= 0 and every >= 1")

    def due(self, number: int) -> bool:
        """Return whether this round is audited."""
        return number % self.every == 0

    def among(self, number: int, updates: Sequence[object]) -> list[int]:
        """Return the indices of the chosen updates of a round, in ascending order."""
        if not self.due(number):
            return []
        if self.count is None or self.count >= len(updates):
            return list(range(len(updates)))
        generator = random.Random(f"{self.seed}/{number}")  # noqa: S311  # The choice needs no cryptographic quality.
        return sorted(generator.sample(range(len(updates)), self.count))


class RoundStore:
    """The latest ``most`` rounds of every client, one file for each round, below the folder for reports."""

    def __init__(self, out: Path, most: int) -> None:
        self.folder, self.most = out / FOLDER, most

    def earlier(self, client: str) -> list[ClientUpdate]:
        """Return the stored rounds of a client, oldest first. Files that cannot be read are deleted."""
        self._delete_old()
        found = []
        for path in self._files(client):
            try:
                found.append(ClientUpdate.load(path).read())
            except SpearError:
                path.unlink(missing_ok=True)
        return found

    def add(self, client: str, update: ClientUpdate) -> None:
        """Store a round of a client, and delete its oldest rounds beyond the limit."""
        files = self._files(client)
        number = int(files[-1].stem) + 1 if files else 1
        folder = self.folder / client
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        update.save(folder / f"{number:09d}.safetensors")
        for path in self._files(client)[: -self.most]:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all rounds of all clients."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _files(self, client: str) -> list[Path]:
        return sorted(path for path in (self.folder / client).glob("*.safetensors") if path.stem.isdecimal())

    def _delete_old(self) -> None:
        for path in self.folder.glob("*/*.safetensors"):
            with suppress(OSError):  # the file was deleted meanwhile
                if time.time() - path.stat().st_mtime > MAX_AGE:
                    path.unlink(missing_ok=True)
