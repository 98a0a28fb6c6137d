"""Earlier rounds of each client, kept on disk for a limited time so that rounds can be audited together."""

import shutil
import time
from pathlib import Path

from spearpp.errors import SpearError
from spearpp.update import ClientUpdate

FOLDER = ".history"
"""Folder below the folder for reports that contains the rounds."""
MAX_AGE = 7 * 24 * 3600.0
"""Seconds after which a stored round is deleted: one week. Design choice: an update may contain personal data, so it
must not be kept without need."""


class RoundStore:
    """The latest rounds of every client, one file for each round, under the pseudonym of the client.

    Args:
        out: folder for reports. The rounds are stored below it.
        most: largest number of earlier rounds of a client. The oldest are deleted.
    """

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
        """Store a round of a client, and delete its oldest rounds beyond the limit.

        Raises:
            SpearError, OSError: if the round cannot be stored.
        """
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
            try:
                if time.time() - path.stat().st_mtime > MAX_AGE:
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # the file was deleted meanwhile
