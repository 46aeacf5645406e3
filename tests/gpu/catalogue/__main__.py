"""``python tests/gpu/catalogue WHEEL...``, or ``python -m`` with ``tests/gpu`` on the path."""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from catalogue.runner import main

if __name__ == "__main__":
    sys.exit(main())
