"""`python -m pack_miles`: the same as the `pack-miles` command."""

import sys

from pack_miles.cli import main

if __name__ == "__main__":
    sys.exit(main())
