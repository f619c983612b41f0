"""Find a model's directory, compute its fingerprint, and check its files.  SPEC 5.1.

Routers and workers find the model with `locate` and compare its `fingerprint`.  The router checks
the files before it starts workers, and a worker before it loads them, so that a missing or
truncated file is reported early, in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from wire.errors import ErrorCode, WireError

# The model for `--model demo`, which is part of the package `wire`.
DEMO: Final = Path(__file__).parent.with_name("demo")
# The values of `model_type` in config.json that `worker.model.families` supports.
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
# Small files that may be missing, but must not be truncated.
OPTIONAL: Final = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
# The files to download from the Hugging Face hub.
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


class ModelError(ValueError):
    """A model cannot be served; the message names the file and the key or tensor."""


def locate(model: str) -> Path:
    """Return the directory of a model: ``demo``, a directory, or a name on the Hugging Face hub.

    Raises:
        WireError: MODEL_NOT_FOUND; the message has the reason.
    """
    if model == "demo":
        return _checked(DEMO, model)
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _checked(directory, model)
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise _not_found(model, "there is no such directory")
    # Imported here because it takes half a second, and local models do not need it.
    from huggingface_hub import snapshot_download

    from wire.process.download import progress_bar

    try:
        path = snapshot_download(model, allow_patterns=_WANTED, tqdm_class=progress_bar(model))
        return _checked(Path(path), model)
    except (OSError, ValueError) as error:
        raise _not_found(model, f"no such directory, and {_of_hub(error)}") from error


def fingerprint(directory: Path) -> str:
    """Hash config.json, tokenizer.json and the weight files' names and sizes to 16 hex digits.

    Directories with the same fingerprint are considered the same model.  Weights changed in place
    without a change of their size are not detected.
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
    """Return `vocab_size` from config.json, None if it is missing.  Raises ModelError."""
    path = directory / "config.json"
    size = text_keys(read_json(path)).get("vocab_size") if path.is_file() else None
    if size is not None and not (type(size) is int and size >= 1):
        raise ModelError(f"{path}: vocab_size is {repr(size)[:100]}, not a whole number from 1")
    return size


def check_files(path: Path) -> None:
    """Raise ModelError if config.json is missing or a small file is not valid JSON."""
    read_json(path / "config.json")
    for name in OPTIONAL:
        if (path / name).is_file():
            read_json(path / name)


def check_weights(path: Path) -> None:
    """Raise ModelError if the model family is unknown or a weight file is incomplete."""
    config = path / "config.json"
    content = read_json(config)
    try:
        check_family(content.get("model_type"))
    except ModelError as error:
        raise ModelError(f"{config}: {error}") from error
    for file in checkpoint_files(path):
        _check_header(file)


def check_family(name: object) -> str:
    """Return the `model_type` given, or raise ModelError if it is not one of `FAMILIES`."""
    if not isinstance(name, str) or name not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise ModelError(f"model_type is {repr(name)[:100]}, not one of {families}")
    return name


def text_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with the keys of its `text_config` merged in.  Raises ModelError."""
    text = config.get("text_config", {})
    if not isinstance(text, dict):
        raise ModelError(f"text_config is {repr(text)[:100]}, not an object")
    return {**config, **text}


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON file that contains an object.  Raises ModelError."""
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
    """List the safetensors files of a model directory.  Raises ModelError if any is missing."""
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


def _of_hub(error: Exception) -> str:
    """Say what an error of huggingface_hub means."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return "the hub asks you to accept the model's terms there, and then to set HF_TOKEN"
        case RepositoryNotFoundError():
            return "the hub has no such model, or it is private: then set HF_TOKEN"
        case LocalEntryNotFoundError():
            return "the hub cannot be reached, and the model was not downloaded before"
        case ValueError():
            return "it is not a valid name on the hub"
    return f"the download from the hub failed: {type(error).__name__}"


def _not_found(model: str, reason: str) -> WireError:
    return WireError(
        ErrorCode.MODEL_NOT_FOUND,
        f"model {model!r}: {reason}; give 'demo', a Hugging Face model directory or a hub name",
    )


def _check_header(file: Path) -> None:
    """Raise ModelError if a safetensors file is truncated or has an invalid header."""
    # Imported here because it imports NumPy, which a router does not need otherwise.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: {error}; is the file whole?") from error
