"""``python -m spearpp`` is the command line."""

import sys

from spearpp.cli import main

if __name__ == "__main__":
    sys.exit(main())
