"""`pack-miles` with OLMo-core's GPU leaves replaced: a main module, which every spawned rank imports, too."""

import sys

from pack_miles.cli import main
from support.olmo_leaves import replace_gpu_leaves

# On purpose outside the guard: a spawned rank imports this file before it does anything else.
replace_gpu_leaves()

if __name__ == "__main__":
    sys.exit(main())
