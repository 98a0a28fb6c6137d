"""A cell: one setting with one seed. Cells are the unit that is measured, stored and sent to workers.

A cell is identified by its setting, encoded as JSON, its seed, and the version of the code that measures it. ``decode``
creates only objects of the classes in ``KINDS``, so a file of settings cannot make it run any other code.
"""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy
import scipy
import torch

from spearpp.about import __version__
from spearpp.errors import OptionError, SpearError
from spearpp.search import Gated, KernelSampling, ProjectedGradient, RiemannianAdam
from spearpp.search.gated.descent import Effort
from spearpp.search.losses import L1, LogCosh, NegativeL4
from spearpp.search.rounding import NoRounding, SamplingRounding
from spearpp.simulate import DPSGD, Cast, FedAvg, FedSGD, OpacusDPSGD, Quantise, SumOfClients, TopK
from spearpp.simulate.clients import Changed

FIRST_SEED = 1000
"""Seed of the first cell of a setting. Any fixed number would do; stored results depend on it."""
KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(L1, LogCosh, NegativeL4, NoRounding, SamplingRounding),
        *(RiemannianAdam, ProjectedGradient, KernelSampling, Gated, Effort),
        *(FedSGD, FedAvg, DPSGD, OpacusDPSGD, SumOfClients, Changed, TopK, Quantise, Cast),
    )
}
"""Classes that can be encoded and decoded, by name. ``register`` adds more."""
DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
PACKAGE = Path(__file__).parents[1]
NOT_MEASURING = frozenset(
    "__init__.py __main__.py about.py cli dp experiments integrations pictures.py plotting.py report".split()  # noqa: SIM905
)
"""Files and packages that a measurement does not run. Of ``experiments``, only ``MEASURING`` is part of the digest."""
MEASURING = tuple(f"experiments/{name}.py" for name in ("attack", "rounds", "source", "training"))
"""Files of ``experiments`` that a measurement runs."""


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
        text = json.dumps({"code": code_version(), "seed": self.seed, "setting": self.identity}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def measure(self, device: torch.device) -> dict[str, Any]:
        """Measure the setting with the seed on a device."""
        return self.setting.measure(self.seed, device)


def cells_of(setting: Setting, count: int) -> list[Cell]:
    """Return ``count`` cells of a setting, with the seeds 1000, 1001, ...

    >>> from spearpp.experiments.attack import Attack
    >>> [cell.seed for cell in cells_of(Attack(b=4, m=60), 2)]
    [1000, 1001]
    """
    return [Cell(setting, seed) for seed in range(FIRST_SEED, FIRST_SEED + count)]


def register(kind: type) -> type:
    """Class decorator: add a frozen dataclass to ``KINDS``."""
    KINDS[kind.__name__] = kind
    return kind


def encode(value: object) -> Any:
    """Encode an object as JSON values: its fields, and the name of its class under ``type``.

    The object has a class in ``KINDS``, or is a list or tuple, a dtype or a JSON value. Fields that only say where a
    file is (``metadata={"place": True}``) are left out.

    >>> encode(LogCosh(0.5))
    {'type': 'LogCosh', 'mu': 0.5}
    """
    if is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if KINDS.get(name) is not type(value):
            raise OptionError(f"{name} cannot be written to a store: supported are {', '.join(sorted(KINDS))}")
        kept = [each for each in fields(value) if not each.metadata.get("place")]
        written = {each.name: getattr(value, each.name) for each in kept}
        for each in kept:  # so that 2 and 2.0 have the same key
            if "float" in str(each.type) and isinstance(written[each.name], int):
                written[each.name] = float(written[each.name])
        return {"type": name, **{key: encode(inner) for key, inner in written.items()}}
    if isinstance(value, tuple | list):
        return [encode(inner) for inner in value]
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(f"{value!r} cannot be written as JSON")


def decode(value: Any) -> Any:
    """Create the object that JSON or TOML values in the form of ``encode`` describe.

    >>> decode({"type": "RiemannianAdam", "loss": {"type": "LogCosh", "mu": 0.5}}).loss
    LogCosh(mu=0.5)
    """
    if isinstance(value, Mapping):
        options = dict(value)
        name = options.pop("type", None)
        if name not in KINDS:
            raise OptionError(f"type={name!r}: expected one of {', '.join(sorted(KINDS))}")
        try:
            return KINDS[name](**{key: decode(inner) for key, inner in options.items()})
        except TypeError as error:
            raise OptionError(f"{name} does not take these options: {error}") from error
    if isinstance(value, list | tuple):
        return tuple(decode(inner) for inner in value)
    return DTYPES.get(value, value) if isinstance(value, str) else value


def canonical(value: object) -> str:
    """Return the canonical JSON of a setting: sorted keys, no spaces, no file paths.

    >>> canonical(FedAvg(epochs=3, mini_batch=5, rate=1))
    '{"epochs":3,"mini_batch":5,"momentum":0.0,"rate":1.0,"type":"FedAvg","weight_decay":0.0}'
    """
    try:
        return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise SpearError(f"{value!r} contains NaN or Inf: a setting needs finite numbers") from error


@cache
def code_version() -> str:
    """Return the release and a digest of the source files that a measurement runs.

    Results of another code version stay in the store, but reports do not use them.

    >>> code_version().startswith(__version__ + "+")
    True
    """
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.relative_to(PACKAGE).parts[0] not in NOT_MEASURING]
    digest = hashlib.sha256()
    for file in [*files, *(PACKAGE / name for name in MEASURING)]:
        digest.update(file.relative_to(PACKAGE).as_posix().encode())
        digest.update(file.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


@cache
def commit() -> str:
    """Return the git commit of the source, followed by ``-dirty`` if files have changed since.

    Without git, for example in a container image, return the environment variable SPEARPP_COMMIT, or "unknown".
    """
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # fails if the repository does not track this package
        dirty = "-dirty" if _git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return _git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SPEARPP_COMMIT", "unknown")


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of Python and the libraries, and the device, of this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "device": f"{device.type}: {name}",
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
    return done.stdout.strip()
