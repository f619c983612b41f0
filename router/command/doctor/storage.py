"""Checks of files and memory: the model, the caches, the KV on disk, and room for the KV cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from router.command.doctor.finding import Finding, fault, ok, warning
from wire.errors import WireError
from wire.process.model import (
    ModelError,
    check_files,
    check_weights,
    fingerprint,
    locate,
    read_json,
    text_keys,
)

GIB: Final = 1 << 30


def find_model(model: str) -> Path | Finding:
    """Return the directory of a model that is on this machine; a finding if it is not.

    Nothing is downloaded.
    """
    is_hub_name = not Path(model).expanduser().is_dir() and model.count("/") == 1
    if is_hub_name and not model.startswith((".", "~", "/")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):
            what = "is not on this machine yet, so the first start downloads it"
            return warning("model", model, what, f"hf download {model}")
    try:
        return locate(model)
    except WireError as error:
        return fault("model", model, error.message, "--model DIR, the directory with config.json")


def check_model(model: str, *, has_weights: bool, cluster_fingerprint: str = "") -> list[Finding]:
    """Check that a model's files are here and whole, and the same as those of a running router."""
    path = find_model(model)
    if isinstance(path, Finding):
        return [path]
    where = str(path)
    again = f"hf download {model if model.count('/') == 1 else 'NAME'} --local-dir {path}"
    try:
        check_files(path)
        if has_weights:
            check_weights(path)
    except ModelError as error:
        return [fault("model", where, str(error), again)]
    found = []
    if not (path / "tokenizer.json").is_file():
        what = "has no tokenizer.json, so prompts must be token ids and chats are refused"
        found.append(warning("model", where, what, f"copy tokenizer.json to {path}"))
    own = fingerprint(path)
    if cluster_fingerprint not in ("", own):
        what = (
            f"fingerprint {own}, and the router has {cluster_fingerprint}: it would refuse workers"
        )
        cure = f"rsync -a ROUTER:{path}/ {path}/, or give both the same --model"
        return [*found, fault("model", where, what, cure)]
    return [*found, ok("model", where, f"is whole, fingerprint {own}")]


def kv_token_bytes(config: Mapping[str, Any], value_bytes: int) -> int | None:
    """Estimate the KV bytes of a token from config.json; None if it lacks a size.

    All layers are counted as full attention, so it is the most that a token takes.
    """
    keys = text_keys(config)
    names = "num_hidden_layers", "hidden_size", "num_attention_heads"
    layers, width, heads = (keys.get(name, 0) for name in names)
    kv_heads = keys.get("num_key_value_heads", heads)
    try:
        head_dim = keys.get("head_dim") or width // heads
        return int(2 * layers * kv_heads * head_dim * value_bytes) or None
    except (TypeError, ZeroDivisionError):
        return None


def check_memory(
    workers: Sequence[Any], path: Path, free_bytes: int | None, *, is_gpu: bool = False
) -> Finding:
    """Compare what workers would take of the memory of this machine or its GPU with what is free.

    `workers` are of `worker.config.Config`; `path` is the directory of their model.
    """
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    wanted = 0
    for worker in workers:
        token_bytes = kv_token_bytes(read_json(path / "config.json"), _value_bytes(worker)) or 0
        blocks = worker.num_blocks * worker.block_size * token_bytes
        wanted += weights + (blocks or worker.kv_cache_bytes)
        wanted += 0 if is_gpu else worker.host_kv_bytes
    where = f"{len(workers)} workers" if len(workers) > 1 else "one worker"
    what = f"about {wanted / GIB:.1f} GiB for weights and KV"
    if free_bytes is None:
        return ok("memory", where, f"{what}; free memory is unknown here")
    what += f", and {free_bytes / GIB:.1f} GiB are free" + (" on the GPU" if is_gpu else "")
    if wanted <= free_bytes:
        return ok("memory", where, what)
    left = max(0, free_bytes - weights * len(workers)) // max(1, len(workers))
    cure = (
        f"--kv-cache-bytes {left} without --num-blocks, or fewer workers"
        if left
        else "take a smaller model, --weights int8 or fewer workers"
    )
    return fault("memory", where, what, cure)


def _value_bytes(worker: Any) -> int:
    """Return the bytes of a key or value; "auto" may be float32 on a CPU but is mostly bfloat16."""
    dtype = worker.dtype if worker.kv_dtype == "auto" else worker.kv_dtype
    return 4 if dtype == "float32" else 2


def check_cache(environ: Mapping[str, str]) -> Finding:
    """Check the directory of compiled code, which must be writable and closed to other users."""
    # As in kernels/cache.py, which no router may import.
    path = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "baton", "kernels")
    where, slow = str(path), "so every start compiles for a minute"
    elsewhere = "export XDG_CACHE_HOME=DIR, a directory that only this user can write"
    try:
        path = path.expanduser()
        there = next(each for each in (path, *path.parents) if each.exists())
        state = there.stat()
    except (OSError, RuntimeError) as error:
        return warning("cache", where, f"cannot be used ({error}), {slow}", elsewhere)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return warning("cache", where, f"{there} is not writable, {slow}", elsewhere)
    if there == path and state.st_uid != os.geteuid():
        return warning("cache", where, f"belongs to user {state.st_uid}, {slow}", elsewhere)
    if there == path and state.st_mode & 0o022:
        what = (
            f"mode {state.st_mode & 0o777:o}: other users could put code there, which workers run"
        )
        return fault("cache", where, what, f"rm -r {path}")
    return ok("cache", where, "is writable, by this user only")


def check_disk_kv(worker: Any) -> Finding | None:
    """Check the directory of --disk-kv of a worker; None without one."""
    path, wanted = worker.disk_kv, worker.disk_kv_bytes
    if path is None:
        return None
    where = f"--disk-kv {path}"
    there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        cure = f"mkdir -p {path} && chown $USER {path}"
        return fault("disk", where, f"{there} is no directory that this user can write to", cure)
    kept = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    room = shutil.disk_usage(there).free + kept
    if room < wanted:
        what = f"{wanted} bytes are wanted, and there is room for {room}"
        return fault("disk", where, what, f"--disk-kv-bytes {room * 9 // 10}, or make room there")
    return ok("disk", where, f"is writable, with room for {room / GIB:.1f} GiB")
