#!/usr/bin/env python
"""Predict with a model that train_tox21.py made; ROC-AUC of each assay where labels are known.

python predict_tox21.py --in-dir result                      # the test part of its data
python predict_tox21.py --in-dir result --data molecules.csv # a file with a column smiles
python predict_tox21.py --in-dir result --smiles CCO 'Oc1ccc(cc1)C(C)(C)c1ccc(O)cc1'
"""

import train_tox21  # before common: puts its folder on sys.path
from common import prediction, training

if __name__ == '__main__':
    training.main(lambda: prediction.predict(train_tox21))
