"""`python -m router`: take requests over HTTP and raw TCP, and place them on workers.

Imports are nearly all of a start, and after a crash everybody waits for it.
"""

from __future__ import annotations

import gc
import sys


def main(argv: list[str]) -> int:
    """Run to the end and return the exit status."""
    # Nothing that an import makes is garbage, and it stays: to look through it later, in a full
    # collection, stopped everybody for 60 ms.
    gc.disable()
    from router.start import start

    gc.freeze()
    gc.enable()
    return start(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
