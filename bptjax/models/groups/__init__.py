"""Config groups of the model, one per part. Each belongs to the module that reads it."""
