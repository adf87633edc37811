"""Your CSV file for the scripts in this folder."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

from common.data import read_csv
from common.tasks import TASKS


def task_of(kind, labels):
    """Return what is learned: 'regression' or 'classification' of the columns `labels`."""
    return TASKS[kind](labels)


def read_own(path, smiles_column, task, missing='refuse'):
    """Read the CSV file, plain or compressed; `missing` as of `common.data.read_csv`.

    Returns:
        tuple: (description (str), table as of `common.data.read_csv`).
    """
    columns = {name: name for name in task.names}
    return path, read_csv(path, smiles_column, columns, task, missing)
