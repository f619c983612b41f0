"""Where a model lies and which one it is; both sides of the wire must mean the same.  SPEC 5.1.

Only names, sizes and small files are read here: whoever needs the weights loads them.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Final

from wire.errors import ErrorCode, WireError

# The directory shipped inside this package; `--model demo`.
DEMO: Final = Path(__file__).with_name("demo")
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


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


def _checked(directory: Path, model: str) -> Path:
    if not (directory / "config.json").is_file():
        raise _not_found(model, f"{directory} has no config.json")
    return directory


def _not_found(model: str, reason: str) -> WireError:
    return WireError(
        ErrorCode.MODEL_NOT_FOUND,
        f"model {model!r}: {reason}; give 'demo', a Hugging Face model directory or a hub name",
    )
