"""`python -m pack_torch`: pack files of documents, or ask which capacity suits them."""

import sys

from pack_torch.cli import main

if __name__ == "__main__":
    sys.exit(main())
