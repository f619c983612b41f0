"""The progress of a download from the Hugging Face hub, as log lines instead of a bar."""

from __future__ import annotations

from io import StringIO
from typing import Any, Final

import structlog
from huggingface_hub.utils.tqdm import tqdm

from wire.process.log_limit import ProgressLine

log = structlog.get_logger("wire")

# The bar of bytes on the network, which compression makes fewer than those of the files.
_NETWORK: Final = "Downloading bytes"


def progress_bar(model: str) -> type[tqdm]:
    """Return the class of progress bars for `snapshot_download`, which log "downloading" lines.

    `done` and `of` are bytes.  Older releases of huggingface_hub have no bar for all bytes: then
    nothing is logged.
    """
    line = ProgressLine(log.info, "downloading", model=model)

    class LoggedBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # A bar is disabled where stderr is no terminal.
            super().__init__(  # type: ignore[no-untyped-call]
                *args, **{**kwargs, "disable": False, "file": StringIO()}
            )

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total and self.desc.removesuffix(": ") != _NETWORK:
                line.at(int(self.n), int(self.total))

    return LoggedBar
