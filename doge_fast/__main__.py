"""`python -m doge_fast VERB` is `doge-fast VERB`."""

import sys

from doge_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
