"""Flags and config keys: names, values, and one-line errors."""
