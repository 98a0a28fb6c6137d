"""Experiments that survive: the paper's tables and the frontier of defences, cell by cell, in one store."""

from spearpp.experiments.attack import Attack, Measurement
from spearpp.experiments.cell import Cell, Setting, cells_of
from spearpp.experiments.engines import Engine, Failed, Local, Ray
from spearpp.experiments.run import Progress, run
from spearpp.experiments.source import Source
from spearpp.experiments.store import Store, StoreError
from spearpp.experiments.table import TABLES, Table, load
from spearpp.experiments.training import Training

__all__ = [
    "TABLES",
    "Attack",
    "Cell",
    "Engine",
    "Failed",
    "Local",
    "Measurement",
    "Progress",
    "Ray",
    "Setting",
    "Source",
    "Store",
    "StoreError",
    "Table",
    "Training",
    "cells_of",
    "load",
    "run",
]
