"""What a Hugging Face model directory must hold to be served, as far as small reads can tell.

The router looks before it starts workers, a worker before it loads: a file that is cut off or not
there is one sentence, at once.  Nothing is computed here, and no tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

# The `model_type`s of config.json that the transformer of `worker` computes.
FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
INDEX: Final = "model.safetensors.index.json"
OPTIONAL: Final = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
SINGLE: Final = "model.safetensors"


class ModelError(ValueError):
    """A model directory cannot be served; the message names the file and the key or tensor."""


def check_files(path: Path) -> None:
    """Refuse a directory whose small files are not whole; whatever executor is to run it.

    Raises:
        ModelError: One of them is cut off, or config.json is not there.
    """
    read_json(path / "config.json")
    for name in OPTIONAL:
        if (path / name).is_file():
            read_json(path / name)


def check_weights(path: Path) -> None:
    """Refuse a directory whose family is none of ours, or whose weights are not whole.

    Raises:
        ModelError: It cannot be served by our own transformer.
    """
    config = path / "config.json"
    content = read_json(config)
    try:
        check_family(content.get("model_type"))
    except ModelError as error:
        raise ModelError(f"{config}: {error}") from error
    for file in checkpoint_files(path):
        _check_size(file)


def check_family(name: object) -> str:
    """Return this `model_type`.  Raises ModelError if it is none of `FAMILIES`."""
    if not isinstance(name, str) or name not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise ModelError(f"model_type is {repr(name)[:100]}, not one of {families}")
    return name


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelError: The file is not there, is cut off, or holds something else.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; not a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; is the file whole?") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: not a JSON object")
    return parsed


def checkpoint_files(path: Path) -> Sequence[Path]:
    """Return the safetensors files of a model directory.

    Raises:
        ModelError: There are none, or the index names files that are not there.
    """
    index = path / INDEX
    if not index.is_file():
        if not (path / SINGLE).is_file():
            raise ModelError(f"{path} has neither {SINGLE} nor {INDEX}")
        return [path / SINGLE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: no weight_map from tensors to files")
    files = [path / name for name in sorted({str(name) for name in weight_map.values()})]
    absent = [file.name for file in files if file.parent != path or not file.is_file()]
    if absent or not files:
        shown = ", ".join(absent[:5]) + ", ..." * (len(absent) > 5)
        raise ModelError(f"{index} names files that are not beside it: {shown}")
    return files


def _check_size(file: Path) -> None:
    """Refuse a safetensors file whose header is not there, or says another size than it has.

    The library would tell as much, but opens a file for NumPy or torch only.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= header_bytes <= size - 8:
            raise ModelError(f"{file}: no safetensors header; is the file whole?")
        header = opened.read(header_bytes)
    try:
        tensors = [
            entry["data_offsets"][1]
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        ]
        expected = 8 + header_bytes + max(tensors, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file}: no safetensors header: {error}") from error
    if expected != size:
        raise ModelError(f"{file} has {size} bytes, its header says {expected}; is the file whole?")
