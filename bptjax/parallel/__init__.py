"""Meshes and sequence-parallel strategies."""
