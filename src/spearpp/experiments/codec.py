"""Encodes settings as JSON, for the key of a cell, and decodes them from TOML files.

``decode`` creates only objects of the classes in ``KINDS``, so a file cannot make it run any other code.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from spearpp.errors import OptionError, SpearError
from spearpp.search import Gated, KernelSampling, ProjectedGradient, RiemannianAdam
from spearpp.search.gated.descent import Effort
from spearpp.search.losses import L1, LogCosh, NegativeL4
from spearpp.search.rounding import LinearProgramRounding, NoRounding, SamplingRounding
from spearpp.simulate import DPSGD, Cast, FedAvg, FedSGD, OpacusDPSGD, Quantise, SumOfClients, TopK

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(L1, LogCosh, NegativeL4, NoRounding, SamplingRounding, LinearProgramRounding),
        *(RiemannianAdam, ProjectedGradient, KernelSampling, Gated, Effort),
        *(FedSGD, FedAvg, DPSGD, OpacusDPSGD, SumOfClients, TopK, Quantise, Cast),
    )
}
"""Classes that can be encoded and decoded, by name. ``register`` adds more."""
DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def register(kind: type) -> type:
    """Class decorator: add a frozen dataclass to ``KINDS``."""
    KINDS[kind.__name__] = kind
    return kind


def encode(value: object, *, identity: bool = False) -> Any:
    """Encode an object as JSON values: its fields, and the name of its class under ``type``.

    Args:
        value: an object of a class in ``KINDS``, a list or tuple, a dtype or a JSON value.
        identity: leave out fields that only say where a file is (``metadata={"place": True}``).

    Raises:
        OptionError: if the value cannot be encoded.

    >>> encode(LogCosh(0.5))
    {'type': 'LogCosh', 'mu': 0.5}
    """
    if is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if KINDS.get(name) is not type(value):
            raise OptionError(f"{name} cannot be written to a store: supported are {', '.join(sorted(KINDS))}")
        kept = [each for each in fields(value) if not (identity and each.metadata.get("place"))]
        written = {each.name: getattr(value, each.name) for each in kept}
        for each in kept:  # so that 2 and 2.0 have the same key
            if "float" in str(each.type) and isinstance(written[each.name], int):
                written[each.name] = float(written[each.name])
        return {"type": name, **{key: encode(inner, identity=identity) for key, inner in written.items()}}
    if isinstance(value, tuple | list):
        return [encode(inner, identity=identity) for inner in value]
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(f"{value!r} cannot be written as JSON")


def decode(value: Any) -> Any:
    """Decode what ``encode`` returned, or the same form in a TOML file.

    Raises:
        OptionError: if the class is not in ``KINDS`` or does not accept the fields.

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
        return json.dumps(encode(value, identity=True), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise SpearError(f"{value!r} contains NaN or Inf: a setting needs finite numbers") from error
