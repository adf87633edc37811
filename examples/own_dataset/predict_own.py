#!/usr/bin/env python
"""Predict with a model that train_own.py made.

python predict_own.py --in-dir result                      # the test part of its data
python predict_own.py --in-dir result --data molecules.csv # a file with the column of SMILES
python predict_own.py --in-dir result --smiles CCO c1ccccc1
"""

import train_own  # before common: puts its folder on sys.path
from common import prediction, training

if __name__ == '__main__':
    training.main(lambda: prediction.predict(train_own))
