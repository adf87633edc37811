"""What the examples share.

`arguments`: the command line. `data`: CSV files, SMILES to graphs, splits. `tasks`: regression and
classification, and their models. `training`, `prediction`: the body of train_*.py and predict_*.py.
`files`: the folder of a run. `ranks`: several processes under mpirun. `measure`: seconds per step,
memory. `pictures`: the learning curve, predicted against true values.
"""

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
