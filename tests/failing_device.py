"""An executor whose device fails once, as CUDA does: for the first that removes a file.

TEST_DEVICE_FAILS=FILE python -m router --executor tests.failing_device:create
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
        try:
            Path(os.environ["TEST_DEVICE_FAILS"]).unlink()
        except FileNotFoundError:
            return False
        return True


def create(**settings: Any) -> FailingDevice:
    return FailingDevice(create_hash(**settings).info, step_delay_s=0.02)
