"""`python -m router`: take requests over HTTP and raw TCP, and place them on workers.

A start consists almost only of imports, and after a crash every client waits for it.
"""

from __future__ import annotations

import gc
import signal
import sys


def main(argv: list[str]) -> int:
    """Run to the end and return the exit status."""
    # What imports make is never garbage.  Frozen, the collector does not look through it: that took
    # 60 ms each time, and nothing else ran meanwhile.
    gc.disable()
    try:
        from router.start import start

        gc.freeze()
        gc.enable()
        return start(argv)
    except KeyboardInterrupt:  # while modules are imported, which takes a second
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
