"""A package, so that tests in other directories may have the same file name."""
