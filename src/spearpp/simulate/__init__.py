"""Simulated clients: networks, data sets that need no download, and the updates that a client would send."""

from spearpp.simulate.backbones import backbone
from spearpp.simulate.batch import Batch, Dataset
from spearpp.simulate.clients import DPSGD, Change, Client, FedAvg, FedSGD, OpacusDPSGD, SumOfClients
from spearpp.simulate.data import breast_cancer, cifar10, digits, photographs, random_batch
from spearpp.simulate.federation import LayerGradient, fedsgd, linear_layers, play_rounds
from spearpp.simulate.files import image_folder, table, torchvision_cifar10
from spearpp.simulate.models import mlp
from spearpp.simulate.wire import Cast, Quantise, TopK

__all__ = [
    "DPSGD",
    "Batch",
    "Cast",
    "Change",
    "Client",
    "Dataset",
    "FedAvg",
    "FedSGD",
    "LayerGradient",
    "OpacusDPSGD",
    "Quantise",
    "SumOfClients",
    "TopK",
    "backbone",
    "breast_cancer",
    "cifar10",
    "digits",
    "fedsgd",
    "image_folder",
    "linear_layers",
    "mlp",
    "photographs",
    "play_rounds",
    "random_batch",
    "table",
    "torchvision_cifar10",
]
