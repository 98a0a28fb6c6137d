"""Names of report folders. They never contain the name of a client."""

import hashlib
import secrets
from dataclasses import dataclass, field


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
