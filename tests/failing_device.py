"""The hash executor on a GPU that fails in the fifth step after a prompt.

python -m router --model demo --executor tests.failing_device:create

TEST_DEVICE_FAILS names a file.  If it is empty, one device fails: that of the process which removes
the file.  If something is in it every device does, and if it is gone none does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from worker.executor.batch import Batch, BatchType
from worker.executor.hash import HashExecutor
from worker.executor.hash import create as create_hash

SENTENCE = "CUDA error: device-side assert triggered"
# A warmup's texts are shorter.
_MIN_POSITION = 20


class FailingDevice(HashExecutor):
    """Raises what torch raises."""

    num_steps = 0

    def forward(self, batch: Batch) -> list[int]:
        if batch.kind is BatchType.DECODE and batch.positions[-1] > _MIN_POSITION:
            self.num_steps += 1
        if self.num_steps >= 5 and self._fails():
            raise torch.AcceleratorError(f"{SENTENCE}\nFor debugging consider passing ...")
        return super().forward(batch)

    def _fails(self) -> bool:
        path = Path(os.environ["TEST_DEVICE_FAILS"])
        try:
            if path.stat().st_size == 0:
                path.unlink()
        except FileNotFoundError:
            return False
        return True


def create(**settings: Any) -> FailingDevice:
    return FailingDevice(create_hash(**settings).info, step_delay_s=0.02)
