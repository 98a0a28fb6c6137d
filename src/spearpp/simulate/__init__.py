"""Clients to attack: networks, data that is there offline, and what a client would send."""

from spearpp.simulate.clients import LayerGradient, dp_sgd, fedavg, fedsgd
from spearpp.simulate.data import Batch, breast_cancer, cifar10, digits, photographs, random_batch
from spearpp.simulate.models import mlp

__all__ = [
    "Batch",
    "LayerGradient",
    "breast_cancer",
    "cifar10",
    "digits",
    "dp_sgd",
    "fedavg",
    "fedsgd",
    "mlp",
    "photographs",
    "random_batch",
]
