"""Long-context training in JAX: blockwise attention and feed-forward, Hugging Face weights in and out."""
