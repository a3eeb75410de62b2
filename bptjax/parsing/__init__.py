"""Flags and config keys: their names, their values, and errors in one line."""
