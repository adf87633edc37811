"""What the examples share.

`data`: CSV files, SMILES to graphs, splits. `tasks`: regression and classification, and their
models. `training`, `prediction`: the body of train_*.py and predict_*.py. `files`: the files in a
run's folder. `measure`: seconds per step, memory. `ranks`: several processes under mpirun.
`arguments`: the command line.
"""
