"""Hugging Face checkpoints, both ways."""
