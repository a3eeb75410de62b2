"""A training run. The files in the order in which a run goes:

setup.py: a config becomes a checked run; data.py: its data; run_directory.py: its directory.
spec.py: config, model and mesh, with the arithmetic of batches and steps.
state.py: parameters, optimizer state, keys: their shapes and shardings, new or from a checkpoint.
step.py: the train step: loss, gradients, update; and evaluation.
resume.py: step 0, or the newest checkpoint.
loop.py: the loop over steps, with evaluations and checkpoints; logs.py: where it logs; guards.py:
what can stop it.
report.py: the files and the summary that a run leaves.
"""
