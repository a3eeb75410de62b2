"""`python -m bptjax COMMAND …`: the same as `bptjax COMMAND …`."""

import sys

from bptjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
