"""Tox21 for the scripts in this folder: Chainer Chemistry's download, or a file in its form."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

import common  # noqa: F401  first: Ctrl-C is one line from here on
import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
from chainer_chemistry.datasets.molnet import molnet
from chainer_chemistry.datasets.molnet.molnet_config import molnet_default_config
from common.data import DataError
from common.data import read_csv
from common.tasks import Classification

ASSAYS = tuple(molnet_default_config['tox21']['tasks'])  # the names of the 12 columns
TASK = Classification(ASSAYS)


def download():
    """Return the path of MoleculeNet's Tox21 file, which Chainer Chemistry downloads once.

    Raises:
        DataError: there is no network, or the server has moved; says where to put the file.
    """
    path = molnet.get_molnet_filepath('tox21', download_if_not_exist=False)
    if os.path.exists(path):
        return path
    try:
        return molnet.get_molnet_filepath('tox21')
    except OSError as error:  # urllib's errors are some
        raise DataError(
            "Chainer Chemistry's download of Tox21 failed (%s: %s). Get tox21.csv.gz of "
            'MoleculeNet elsewhere and name it with --data, or put it where Chainer Chemistry '
            'looks for it: %s' % (type(error).__name__, error, path)
        ) from error


def read_tox21(data, missing='refuse', others=False):
    """Read the molecules that `--data` names.

    Args:
        data (str): 'download', or the path of a CSV file with a column `smiles` and one for each
            assay: 1 active, 0 inactive, nothing where it was not measured.
        missing, others: as of `common.data.read_csv`.

    Returns:
        tuple: (description (str), Rows).
    """
    path, description = data, data
    if data == 'download':
        path = download()
        description = "Tox21 from Chainer Chemistry's download, %s" % path
    return description, read_csv(path, 'smiles', ASSAYS, TASK, missing, others)
