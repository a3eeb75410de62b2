"""Reads and writes Hugging Face checkpoints."""
