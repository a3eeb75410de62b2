"""Commands, one a file: each parses its flags, calls the library and prints."""
