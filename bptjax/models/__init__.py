"""Flax NNX models, held as plain pytrees."""
