"""Groups of choices of the model. Each belongs to the module that reads it."""
