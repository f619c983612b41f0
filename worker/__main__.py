"""`python -m worker --role decode --rank 3`: load the model, warm up, join the routers, serve."""

from __future__ import annotations

import gc
import signal
import sys


def main(argv: list[str]) -> int:
    """Run the worker until it ends and return the exit status."""
    gc.disable()  # objects created by imports are never garbage
    try:
        from worker.start import start

        gc.enable()
        return start(argv)
    except KeyboardInterrupt:  # during the imports, which take a second
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
