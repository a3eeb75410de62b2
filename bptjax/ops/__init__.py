"""Arrays in, arrays out: blockwise attention, feed-forward and loss. Imports jax only."""
