"""Executors by name, plug-ins included; a wrong name says what there is."""

import dataclasses
import gc
import subprocess
import sys
from types import ModuleType

import pytest

from worker.executor import registry
from worker.executor.hash import HashExecutor
from worker.executor.hash import create as hash_executor


def test_the_hash_executor_never_loads_torch() -> None:
    script = (
        "import sys, worker.engine.thread;"
        "from worker.executor.registry import create; create('hash');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def plug_in(monkeypatch: pytest.MonkeyPatch, **capabilities: tuple[str, ...]) -> dict[str, object]:
    """Make `plug_in:make` importable; return what it is called with."""
    seen: dict[str, object] = {}

    def make(**kwargs: object) -> HashExecutor:
        seen.update(kwargs)
        executor = hash_executor()
        executor.capabilities = dataclasses.replace(executor.capabilities, **capabilities)  # type: ignore[arg-type]
        return executor

    module = ModuleType("plug_in")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plug_in", module)
    return seen


def test_a_plug_in_is_called_with_the_same_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = plug_in(monkeypatch)
    assert isinstance(registry.create("plug_in:make", model_name="m", dtype="auto"), HashExecutor)
    assert seen == {"model_name": "m", "dtype": "auto"}
    assert gc.isenabled(), "it is off only while the module is imported"


def test_a_dtype_or_device_it_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, dtypes=("float32",), devices=("cpu",))
    registry.create("plug_in:make", dtype="float32", device="cpu:0")
    with pytest.raises(ValueError, match="--dtype is 'bfloat16', not auto, float32"):
        registry.create("plug_in:make", dtype="bfloat16")
    with pytest.raises(ValueError, match="--device is 'cuda', not auto, cpu"):
        registry.create("plug_in:make", device="cuda")


def test_a_setting_that_it_does_not_take_is_named() -> None:
    with pytest.raises(ValueError, match=r"'hash' does not take these settings.*'kv_dtype'"):
        registry.create("hash", kv_dtype="bfloat16")


@pytest.mark.parametrize("name", ["", "hsah", "json:", ":create", "no_such_module:create"])
def test_an_unknown_name_says_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="there are torch, hash, module:factory"):
        registry.create(name)


def test_a_module_without_the_factory_is_named() -> None:
    with pytest.raises(ValueError, match="json has no factory 'no_such'"):
        registry.create("json:no_such")


def test_a_plug_in_that_lacks_a_module_is_not_called_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(registry, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="scipy"):
        registry.create("plug_in:make")
