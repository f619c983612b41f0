"""Default values of sampling fields: neutral, or recommended by generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from wire.options import Penalty, RepetitionPenalty
from wire.process.model import ModelError, read_json
from wire.process.settings import ConfigError

FILE: Final = "generation_config.json"


class Defaults(Struct, frozen=True, rename={"max_tokens": "max_new_tokens"}):
    """Default values; without arguments, neutral.  `max_tokens` None means the whole context."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    @property
    def non_neutral(self) -> dict[str, Any]:
        """The values that are not neutral, by name."""
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value != getattr(NEUTRAL, name)}


NEUTRAL: Final = Defaults()


def read_defaults(generation_config: str, model_path: Path) -> Defaults:
    """Read the defaults from ``auto`` (the model directory), ``none`` or another directory.

    Raises:
        ConfigError: The directory has no generation_config.json.
        ModelError: A value is out of range.
    """
    if generation_config == "none":
        return NEUTRAL
    path = (model_path if generation_config == "auto" else Path(generation_config)) / FILE
    if not path.is_file():
        if generation_config == "auto":
            return NEUTRAL
        raise ConfigError(f"--generation-config {generation_config} has no {FILE} in it")
    values = {name: value for name, value in read_json(path).items() if value is not None}
    try:
        return msgspec.convert(values, Defaults, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from error
