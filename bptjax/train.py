"""`python -m bptjax.train …`: the same as `bptjax train …`."""

import sys

from bptjax.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
