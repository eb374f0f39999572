"""`python -m splitserve`: the same as the `splitserve` command."""

import sys

from splitserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
