"""Files, processes, checkpoints and metrics of a run. Imports no other room."""
