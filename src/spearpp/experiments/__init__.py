"""Resumable experiments: the tables of the paper, and the frontier of defences that stop recovery.

An experiment is a list of cells. A cell is one setting with one seed. ``run`` measures the cells that a store does not
hold yet, on this machine (``Local``) or on a Ray cluster (``Ray``), and stores every result as soon as it is measured.
"""

from spearpp.experiments.attack import Attack, Measurement
from spearpp.experiments.cell import Cell, Setting, cells_of
from spearpp.experiments.engine import Engine, Failed, Progress, run
from spearpp.experiments.local import Local
from spearpp.experiments.ray import Ray
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
