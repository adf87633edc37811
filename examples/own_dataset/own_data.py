"""Your CSV file for the scripts in this folder."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

import common  # noqa: F401  first: Ctrl-C is one line from here on
from common.data import read_csv
from common.tasks import TASKS


def task_of(kind, labels):
    """Return what is learned: 'regression' or 'classification' of the columns `labels`."""
    return TASKS[kind](labels)


def read_own(path, smiles_column, task, missing='refuse', others=False):
    """Return (description (str), rows) of a CSV file, as :func:`common.data.read_csv` reads it."""
    return path, read_csv(path, smiles_column, task.names, task, missing, others)
