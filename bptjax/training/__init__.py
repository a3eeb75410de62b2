"""A training run. The files in the order of a run:

- setup.py: makes a checked run from a config; data.py: its data; run_directory.py: its directory.
- spec.py: config, model and mesh, with the arithmetic of batches and steps.
- state.py: parameters, optimizer state, keys: their shapes and shardings, new or restored.
- step.py: the train step (loss, gradients, update), and evaluation.
- resume.py: step 0, or the newest checkpoint.
- loop.py: the loop over steps; logs.py: its logs; guards.py: events that can stop it.
- report.py: the final files and summary.
"""
