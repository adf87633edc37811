#!/usr/bin/env python
"""Predict with a model that train_qm9.py made.

python predict_qm9.py --in-dir result                      # the test part of its data
python predict_qm9.py --in-dir result --data molecules.csv # a file with a column smiles
python predict_qm9.py --in-dir result --smiles CCO c1ccccc1
"""

import train_qm9  # before common: puts its folder on sys.path
from common import prediction, training

if __name__ == '__main__':
    training.main(lambda: prediction.predict(train_qm9))
