"""Your CSV file for the scripts in this folder."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

from common.data import read_csv
from common.tasks import TASKS


def task_of(settings):
    """Return what is learned: a regression or classification of some columns."""
    return TASKS[settings['task']](settings['labels'])


def read(data, settings, **options):
    """Return (description, rows) of a CSV file, by :func:`common.data.read_csv`."""
    return data, read_csv(
        data, settings['smiles_column'], settings['labels'], task_of(settings), **options
    )
