"""Models on disk: formats in both directions, adapters, kernels in few bits, loading."""
