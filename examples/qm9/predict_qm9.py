#!/usr/bin/env python
"""Predict with a model that train_qm9.py made.

python predict_qm9.py --in-dir result                      # the test part of its data
python predict_qm9.py --in-dir result --data molecules.csv # a file with a column smiles
python predict_qm9.py --in-dir result --smiles CCO c1ccccc1
"""

import qm9_data  # before common, which it finds
from common import arguments
from common import prediction
from common import training


def run():
    """Predict, and write the CSV file."""
    parser = arguments.make_parser('Prediction with a model trained on QM9.')
    arguments.add_prediction_arguments(
        parser, 'train_qm9.py', 'sample, full, or a CSV file with a column smiles'
    )
    return prediction.predict(
        parser.parse_args(),
        'train_qm9.py',
        lambda settings: qm9_data.task_of(settings['label']),
        lambda data, settings, task, missing: qm9_data.read_qm9(data, task, missing, others=True),
    )


if __name__ == '__main__':
    training.main(run)
