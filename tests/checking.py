"""The type checker that conftest applies to every call into the package: an int passes for a float.

beartype checks random items of a list. It gets random numbers of its own, because tests check that an audit leaves the
random numbers of its platform alone.
"""

import random

_platform = random.getrandbits
random.getrandbits = random.Random(0).getrandbits  # noqa: S311
from beartype import BeartypeConf, beartype  # noqa: E402

random.getrandbits = _platform

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
