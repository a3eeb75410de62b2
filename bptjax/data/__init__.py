"""From files to batches of token ids, through grain."""
