"""What the router knows of the model from its directory, without computing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from wire.process.model import ModelError


class _Model(msgspec.Struct):
    vocab_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


def vocab_size(model_path: Path) -> int | None:
    """Return how many different tokens the model knows; None if config.json does not say.

    Raises:
        ModelError: The file cannot be read as such; the message names it.
    """
    path = model_path / "config.json"
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Model).vocab_size
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from error
