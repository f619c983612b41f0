"""`python -m router.command`: the command `baton` where it is not installed."""

from __future__ import annotations

import sys

from router.command.main import main

if __name__ == "__main__":
    sys.exit(main())
