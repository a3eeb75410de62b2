"""`python -m bptjax COMMAND …`: the same as `bptjax COMMAND …`."""

import sys
from pathlib import Path

# `python -m` searches the current directory first, where other users may have put modules.
if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
    del sys.path[0]

from bptjax.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
