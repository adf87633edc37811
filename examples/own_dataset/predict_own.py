#!/usr/bin/env python
"""Predict with a model that train_own.py made.

python predict_own.py --in-dir result                      # the test part of its data
python predict_own.py --in-dir result --data molecules.csv # a file with the column of SMILES
python predict_own.py --in-dir result --smiles CCO c1ccccc1
"""

import own_data  # before common, which it finds
from common import arguments
from common import prediction
from common import training


def run():
    """Predict, and write the CSV file."""
    parser = arguments.make_parser('Prediction with a model of your own.')
    arguments.add_prediction_arguments(
        parser, 'train_own.py', 'a CSV file with the column of SMILES'
    )
    return prediction.predict(
        parser.parse_args(),
        'train_own.py',
        lambda settings: own_data.task_of(settings['task'], settings['labels']),
        lambda data, settings, task, missing: own_data.read_own(
            data, settings['smiles_column'], task, missing, others=True
        ),
    )


if __name__ == '__main__':
    training.main(run)
