"""Models on disk: reading and writing formats, adapters, quantized kernels, loading."""
