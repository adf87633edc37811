#!/usr/bin/env python
"""Predict with a model that train_tox21.py made; ROC-AUC of each assay where labels are known.

python predict_tox21.py --in-dir result                      # the test part of its data
python predict_tox21.py --in-dir result --data molecules.csv # a file with a column smiles
python predict_tox21.py --in-dir result --smiles CCO 'Oc1ccc(cc1)C(C)(C)c1ccc(O)cc1'
"""

import tox21_data  # before common, which it finds
from common import arguments
from common import prediction
from common import training


def run():
    """Predict, and write the CSV file."""
    parser = arguments.make_parser('Prediction with a model trained on Tox21.')
    arguments.add_prediction_arguments(
        parser, 'train_tox21.py', 'download, or a CSV file with a column smiles'
    )
    return prediction.predict(
        parser.parse_args(),
        'train_tox21.py',
        lambda settings: tox21_data.TASK,
        lambda data, settings, task, missing: tox21_data.read_tox21(data, missing, others=True),
    )


if __name__ == '__main__':
    training.main(run)
