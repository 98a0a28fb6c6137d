"""Audits inside a Flower federation: a strategy around yours on the server, a mod on the client.

server: strategy = AuditStrategy(FedAvg(), out="audits")
client: app = ClientApp(mods=[audit_mod("block"), ...])

The mod that comes first in Flower's list is the outermost: only there does it see exactly what leaves.
"""

from spearpp.errors import MissingExtraError

try:
    from spearpp.integrations.flower.mod import audit_mod
    from spearpp.integrations.flower.strategy import AuditStrategy
except ImportError as missing:
    raise MissingExtraError("flwr 1.22 or newer", "flower") from missing

__all__ = ["AuditStrategy", "audit_mod"]
