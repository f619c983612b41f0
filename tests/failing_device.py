"""The hash executor on a GPU that fails once: in the first process that decodes after a prompt.

python -m router --model demo --executor tests.failing_device:create

TEST_DEVICE_FAILS names a file: whoever can remove it is the process whose device fails.
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


class FailingDevice(HashExecutor):
    """Raises what torch raises, in the step after four that decode."""

    num_steps = 0

    def forward(self, batch: Batch) -> list[int]:
        self.num_steps += batch.kind is BatchType.DECODE and batch.positions[-1] > 20
        if self.num_steps > 4:
            try:
                Path(os.environ["TEST_DEVICE_FAILS"]).unlink()
            except FileNotFoundError:
                self.num_steps = -(10**9)
            else:
                raise torch.AcceleratorError(f"{SENTENCE}\nFor debugging consider passing ...")
        return super().forward(batch)


def create(**settings: Any) -> FailingDevice:
    return FailingDevice(create_hash(**settings).info, step_delay_s=0.02)
