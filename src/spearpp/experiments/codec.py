"""Options as JSON and back: what a cell is known by, and what is sent to the worker that measures it.

Only the kinds listed here are ever made from JSON, so a store or a TOML file cannot name anything else.
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
DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def register(kind: type) -> type:
    """Let a frozen dataclass be written and read; a decorator."""
    KINDS[kind.__name__] = kind
    return kind


def encode(value: object, *, identity: bool = False) -> Any:
    """Plain JSON for an options object: its fields, and its kind under ``type``.

    With ``identity`` fields that say only where to find something (``metadata={"place": True}``) are left out.

    >>> encode(LogCosh(0.5))
    {'type': 'LogCosh', 'mu': 0.5}
    """
    if is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if KINDS.get(name) is not type(value):
            raise OptionError(f"{name} cannot be written to a store: experiments know {', '.join(sorted(KINDS))}")
        kept = [each for each in fields(value) if not (identity and each.metadata.get("place"))]
        written = {each.name: getattr(value, each.name) for each in kept}
        for each in kept:  # 2 and 2.0 are one option
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
    """The options object that ``encode`` wrote, or that a TOML file spells out.

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
    """One text for one value: sorted keys, no spaces.

    >>> canonical(FedAvg(epochs=3, mini_batch=5, rate=1))
    '{"epochs":3,"mini_batch":5,"momentum":0.0,"rate":1.0,"type":"FedAvg","weight_decay":0.0}'
    """
    try:
        return json.dumps(encode(value, identity=True), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise SpearError(f"{value!r} holds NaN or Inf, which no setting may") from error
