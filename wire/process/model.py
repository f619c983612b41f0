"""A model's directory: its path, its identity, and whether its files are complete.  SPEC 5.1.

Routers and workers find the model with `locate` and compare its `fingerprint`.  The router checks
the files before it starts workers, a worker before it loads them, so that a missing or truncated
file is reported at once in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from wire.errors import ErrorCode, WireError

# The directory shipped inside the package `wire`; `--model demo`.
DEMO: Final = Path(__file__).parent.with_name("demo")
# The `model_type`s of config.json that the transformer of `worker` computes.
FAMILIES: Final = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gpt_oss",
    "gemma3_text",
    "gemma3",
)
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
# Small files that need not be there; those that are must be whole.
OPTIONAL: Final = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
# What is fetched from the Hugging Face hub.
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class ModelError(ValueError):
    """A model directory cannot be served; the message names the file and the key or tensor."""


def locate(model: str) -> Path:
    """Return the directory of a model: ``demo``, a directory, or a name on the Hugging Face hub.

    Raises:
        WireError: MODEL_NOT_FOUND; the message says what was tried.
    """
    if model == "demo":
        return _checked(DEMO, model)
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _checked(directory, model)
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise _not_found(model, "there is no such directory")
    # Imported here: it takes half a second, and a model on disk does not need it.
    from huggingface_hub import snapshot_download

    try:
        return _checked(Path(snapshot_download(model, allow_patterns=_WANTED)), model)
    except (OSError, ValueError) as error:
        raise _not_found(
            model, f"no such directory, and the hub said: {type(error).__name__}"
        ) from error


def fingerprint(directory: Path) -> str:
    """Return 16 hex digits over config.json, tokenizer.json and the weights' names and sizes.

    Two directories with the same fingerprint are taken for the same model; weights that were
    changed in place without changing size are not noticed.
    """
    digest = sha256()
    for name in ("config.json", "tokenizer.json"):
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def vocab_size(directory: Path) -> int | None:
    """Return the size of the vocabulary, None if config.json has none.  Raises ModelError."""
    path = directory / "config.json"
    size = text_keys(read_json(path)).get("vocab_size") if path.is_file() else None
    if size is not None and not (type(size) is int and size >= 1):
        raise ModelError(f"{path}: vocab_size is {repr(size)[:100]}, not a whole number from 1")
    return size


def check_files(path: Path) -> None:
    """Refuse a directory with incomplete small files, whatever the executor.  Raises ModelError."""
    read_json(path / "config.json")
    for name in OPTIONAL:
        if (path / name).is_file():
            read_json(path / name)


def check_weights(path: Path) -> None:
    """Refuse a directory of an unknown family or with incomplete weights.  Raises ModelError."""
    config = path / "config.json"
    content = read_json(config)
    try:
        check_family(content.get("model_type"))
    except ModelError as error:
        raise ModelError(f"{config}: {error}") from error
    for file in checkpoint_files(path):
        _check_header(file)


def check_family(name: object) -> str:
    """Return this `model_type`.  Raises ModelError if it is none of `FAMILIES`."""
    if not isinstance(name, str) or name not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise ModelError(f"model_type is {repr(name)[:100]}, not one of {families}")
    return name


def text_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a config.json with those of its `text_config`.  Raises ModelError."""
    text = config.get("text_config", {})
    if not isinstance(text, dict):
        raise ModelError(f"text_config is {repr(text)[:100]}, not an object")
    return {**config, **text}


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file.  Raises ModelError."""
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
    """Return the safetensors files of a model directory.  Raises ModelError."""
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


def _checked(directory: Path, model: str) -> Path:
    if not (directory / "config.json").is_file():
        raise _not_found(model, f"{directory} has no config.json")
    return directory


def _not_found(model: str, reason: str) -> WireError:
    return WireError(
        ErrorCode.MODEL_NOT_FOUND,
        f"model {model!r}: {reason}; give 'demo', a Hugging Face model directory or a hub name",
    )


def _check_header(file: Path) -> None:
    """Refuse a safetensors file whose header is missing or does not fit its size."""
    # Imported here: NumPy comes with it, which a router needs for this alone.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: {error}; is the file whole?") from error
