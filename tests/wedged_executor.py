"""The hash executor, whose engine stands still once it is given one token.

It creates the file $WEDGED then, and goes on when the file $GO_ON exists.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from worker.executor.batch import Batch
from worker.executor.hash import HashExecutor
from worker.executor.hash import create as create_hash

WEDGE = 1299


class Wedged(HashExecutor):
    """Waits where it should compute."""

    def forward(self, batch: Batch) -> Any:
        if WEDGE in list(batch.token_ids):
            Path(os.environ["WEDGED"]).touch()
            while not Path(os.environ["GO_ON"]).exists():
                time.sleep(0.02)
        return super().forward(batch)


def create(**settings: Any) -> HashExecutor:
    executor = create_hash(**settings)
    executor.__class__ = Wedged
    return executor
