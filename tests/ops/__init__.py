"""A package, so that a test here may have the name of one on another floor."""
