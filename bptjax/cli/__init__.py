"""Commands, one per file: each parses its flags, calls the library and prints."""
