"""Names of folders. A client's own name is in none of them."""

import hashlib
import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pseudonyms:
    """Names for clients that only the holder of the salt can tell: a keyed hash of theirs.

    Without a salt a random one is drawn and kept in memory alone: names then hold for one run.

    >>> Pseudonyms("secret").of(17) == Pseudonyms("secret").of(17) != Pseudonyms("other").of(17)
    True
    """

    salt: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def of(self, client: object) -> str:
        """The client's name for this run."""
        key = hashlib.sha256(self.salt.encode()).digest()
        return "client-" + hashlib.blake2b(str(client).encode(), key=key, digest_size=6).hexdigest()


def round_name(number: int | None) -> str:
    """The folder of a round.

    >>> round_name(7), round_name(None)
    ('round-0007', 'round-unknown')
    """
    return "round-unknown" if number is None else f"round-{number:04d}"


def round_number(name: str) -> int:
    """The round of an audit's name, 0 for one that is not known.

    >>> round_number("round-0007/client-1f9c"), round_number("round-unknown/own")
    (7, 0)
    """
    number = name.split("/")[0].removeprefix("round-")
    return int(number) if number.isdecimal() else 0
