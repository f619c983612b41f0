"""Creates the executor that `--executor` names; a plug-in is given as `module:factory`."""

from __future__ import annotations

import gc
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, Final

from worker.executor.contract import Executor

# torch: real models.  hash: a deterministic fake model, to test everything but the model.
FACTORIES: Final = {"torch": "worker.executor.gpu:create", "hash": "worker.executor.hash:create"}


def create(name: str, **kwargs: Any) -> Executor:
    """Import the module of the executor called `name`, and create the executor.

    Args:
        kwargs: model_path, model_name, fingerprint, dtype, device, max_model_len, and other
            arguments of the factory.

    Raises:
        ValueError: There is no such executor (the message lists the names), or it does not support
            the arguments, the dtype or the device.
    """
    module_name, colon, factory_name = FACTORIES.get(name, name).partition(":")
    if not colon or not module_name or not factory_name:
        raise ValueError(f"there is no executor {name!r}; there are {_names()}")
    try:
        module = _imported(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the plug-in imports is missing
        raise ValueError(
            f"executor {name!r}: there is no module {error.name!r}; there are {_names()}"
        ) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ValueError(f"executor {name!r}: {module_name} has no factory {factory_name!r}")
    try:
        signature(factory).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"executor {name!r} does not take these settings: {error}") from error
    except ValueError:
        pass  # a factory written in C has no signature
    executor: Executor = factory(**kwargs)
    _check(name, "dtype", kwargs.get("dtype", "auto"), executor.capabilities.dtypes)
    device = str(kwargs.get("device", "auto")).partition(":")[0]
    _check(name, "device", device, executor.capabilities.devices)
    return executor


def _imported(name: str) -> ModuleType:
    """Import a module without garbage collection, which takes 0.2 of 1.35 s for torch and Numba."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if was_enabled:
            gc.enable()


def _check(executor: str, setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if the executor does not support this value of a setting."""
    if choices and value not in ("auto", *choices):
        raise ValueError(
            f"executor {executor!r}: --{setting} is {value!r}, not auto, {', '.join(choices)}"
        )


def _names() -> str:
    return ", ".join([*FACTORIES, "module:factory"])
