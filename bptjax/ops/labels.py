"""The label of tokens that do not count in the loss, as in transformers."""

IGNORED = -100
