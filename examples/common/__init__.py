"""What the examples beside this folder share; each script is one path through it.

`data`: CSV files, SMILES to graphs, splits. `tasks`: regression and classification, with their
model. `training`, `prediction`: what the train_*.py and predict_*.py scripts run. `files`: what a
run leaves in its folder. `measure`: seconds a step, memory. `arguments`: the command line.
"""
