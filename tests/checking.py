"""The type checker that conftest applies to calls into the package: an int passes for a float.

In every test, the first calls of each function are checked, and then every hundredth: a search calls the same function
thousands of times with the same shapes, and a check takes longer than most of these calls.

beartype checks random items of a list. It gets random numbers of its own, because tests check that an audit leaves the
random numbers of its platform alone.
"""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

import jaxtyping

_platform = random.getrandbits
random.getrandbits = random.Random(0).getrandbits  # noqa: S311
from beartype import BeartypeConf, beartype  # noqa: E402

random.getrandbits = _platform

FIRST, EVERY = 20, 100
"""How many calls of a function are checked in each test, and which ones after them."""
CALLS: Counter[CodeType] = Counter()
"""Number of calls of each function in the current test."""

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def _now_and_then(function: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    """Return a function that checks its types in some of its calls. Its checked form is made when it is needed."""
    code = function.__code__
    form: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        CALLS[code] += 1
        if CALLS[code] > FIRST and CALLS[code] % EVERY:
            return function(*args, **kwargs)
        if not form:
            form.append(_jaxtyped(function, typechecker=typechecker))
        return form[0](*args, **kwargs)

    return either


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """Return the decorator with which jaxtyping's import hook decorates every function and class."""

    def decorate(what: Any) -> Any:
        if not isinstance(what, type):
            return _now_and_then(what, typechecker)
        if dataclasses.is_dataclass(what) and "__init__" in vars(what):
            type.__setattr__(what, "__init__", _now_and_then(vars(what)["__init__"], typechecker))
        return what

    return decorate


vars(jaxtyping)["jaxtyped"] = jaxtyped
