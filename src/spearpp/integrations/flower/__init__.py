"""Audits inside a Flower federation: a strategy that wraps yours on the server, and a mod on the client.

server: strategy = AuditStrategy(FedAvg(), out="audits")
client: app = ClientApp(mods=[audit_mod("block"), ...])

The first mod in Flower's list is the outermost. Only there the audit sees exactly what the client sends.
"""

from spearpp.errors import needs

with needs("flwr 1.22 or newer", "flower"):
    from spearpp.integrations.flower.mod import audit_mod
    from spearpp.integrations.flower.strategy import AuditStrategy

__all__ = ["AuditStrategy", "audit_mod"]
