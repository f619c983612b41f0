"""The layout holds: import arrows, one importer each of zmq and cupy, no pickle, mirrored tests."""

import ast
import itertools
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("wire", "router", "worker", "kernels")
TOP_LEVEL = {*PACKAGES, "tests", "scripts", "pyproject.toml", "README.md"} | {
    "LICENSE",
    "CHANGELOG.md",
    "constraints.txt",
}

# importer -> what of ours it may import
ARROWS = {
    "wire": {"wire"},
    "kernels": {"kernels"},
    "router": {"router", "wire"},
    "worker": {"worker", "wire", "kernels"},
}
# part of kernels -> what of kernels it may not import: the wings do not know each other, and the
# contract and the reference know neither
WINGS = {
    "kernels/cpu/": ("kernels.cuda",),
    "kernels/cuda/": ("kernels.cpu",),
    "kernels/contract.py": ("kernels.cpu", "kernels.cuda"),
    "kernels/reference.py": ("kernels.cpu", "kernels.cuda"),
}
# The wings and files of a package, from the ground up: nobody imports what stands above.
FLOORS = {
    "wire": ["wire", "wire/transfer", "wire/process", "wire/aio"],
    "router": [
        *(
            "router/text",
            "router/core",
            "router/log.py",
            "router/processes/merged_metrics.py",
            "router/vllm_metrics.py",
            "router/metrics.py",
            "router/tracing.py",
        ),
        "router/page",
        *("router/processes/channel.py", "router/processes/listeners.py"),
        *(
            "router/api/errors.py",
            "router/api/requests",
            "router/api/completions",
            "router/api",
            "router/api/messages",
            "router/api/openapi",
            "router/processes/siblings.py",
            "router/http",
            "router/cores.py",
            "router/config.py",
            "router/endpoints.py",
            "router/tcp.py",
            "router/bus.py",
            "router/local.py",
        ),
        *("router/app.py", "router/processes", "router/start.py", "router/__main__.py"),
        "router/command",
    ],
    "worker": [
        *("worker/model", "worker/compute", "worker/executor", "worker/parallel"),
        *("worker/tiers", "worker/engine", "worker/embedded"),
        *("worker/config.py", "worker/memory.py", "worker/assembly.py", "worker/metrics.py"),
        "worker/processes.py",
        *("worker/transfer/sockets.py", "worker/transfer/thread.py", "worker/environment.py"),
        *("worker/link.py", "worker/transfer", "worker/roles"),
        *("worker/app.py", "worker/start.py", "worker/__main__.py"),
    ],
}
# module -> the only files that may import it
ONLY_IN = {
    "zmq": {"wire/aio/zmq.py", "wire/aio/port.py", "wire/aio/zap.py"},
    "cupy": {"kernels/cuda/backend.py"},
    "opentelemetry": {"router/tracing.py"},
}
# module -> packages that may import it
ONLY_UNDER = {"torch": {"worker", "kernels"}}
# the sans-IO core and the pure modules: nothing here may wait
ASYNC = {
    "wire/aio",
    "wire/process",
    "router/app.py",
    "router/__main__.py",
    "router/http/application.py",
    "router/http/events.py",
    "router/http/limits.py",
    "router/http/requests.py",
    "router/http/asgi.py",
    "router/http/server.py",
    "router/http/structures.py",
    "router/http/transport.py",
    "router/http/verification.py",
    "router/http/writer.py",
    "router/tcp.py",
    "router/local.py",
    "router/command/bench",
    "router/processes/channel.py",
    "router/processes/alone.py",
    "router/processes/process.py",
    "router/processes/siblings.py",
    "router/processes/supervisor.py",
    "router/bus.py",
    "worker/app.py",
    "worker/start.py",
    "worker/compute/handshake.py",
    "worker/compute/rendezvous.py",
    "worker/transfer/same_host_peers.py",
    "worker/transfer/thread.py",
    "worker/transfer/sender.py",
    "worker/transfer/peers.py",
    "worker/transfer/segment_hub.py",
    "worker/transfer/segment_link.py",
    "worker/roles/prefill.py",
    "worker/transfer/receiver.py",
    "worker/roles/decode.py",
    "worker/embedded/serving.py",
}
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
# Types only: there is nothing to run.
DECLARATIONS = {
    "router/api/completions/response.py",
    "router/core/request.py",
}
# One idea a file: what belongs together stays together, and still fits in an afternoon.
MAX_LINES = 500
MAX_FUNCTION_LINES = 60


def modules() -> list[Path]:
    files = itertools.chain.from_iterable((ROOT / name).rglob("*.py") for name in PACKAGES)
    return sorted(path.relative_to(ROOT) for path in files)


@cache
def imports(source: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def broken_arrows(path: Path, source: str) -> list[str]:
    """The forbidden imports of this file."""
    package = path.parts[0]
    found = []
    for name in imports(source):
        top = name.partition(".")[0]
        if top in PACKAGES and top not in ARROWS[package]:
            found.append(f"{path} imports {name}: {package} may not know {top}")
        for wing, others in WINGS.items():
            if str(path).startswith(wing) and name.startswith(others):
                found.append(f"{path} imports {name}: {wing} may not know it")
        if top in ONLY_IN and str(path) not in ONLY_IN[top]:
            found.append(f"{path} imports {name}: only {ONLY_IN[top]} may")
        if top in ONLY_UNDER and package not in ONLY_UNDER[top]:
            found.append(f"{path} imports {name}: only {ONLY_UNDER[top]} may")
        if top == "asyncio" and not any(str(path).startswith(prefix) for prefix in ASYNC):
            found.append(f"{path} imports asyncio: it belongs to the pure part")
        if top in UNPICKLING:
            found.append(f"{path} imports {name}: nothing from a peer is ever unpickled")
    return found


@pytest.mark.parametrize("path", modules(), ids=str)
def test_import_arrows(path: Path) -> None:
    assert broken_arrows(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("wire/frames.py", "import router.core.fleet"),
        ("kernels/reference.py", "from wire import frames"),
        ("kernels/cpu/linear.py", "from kernels.cuda import launch"),
        ("kernels/reference.py", "from kernels.cpu.sampling import sample"),
        ("router/core/policy.py", "from worker.engine import Engine"),
        ("worker/engine/engine.py", "def f():\n    import router"),
        ("worker/link.py", "import zmq.asyncio"),
        ("wire/transfer/sender.py", "import asyncio"),
        ("wire/options.py", "from pickle import loads"),
    ],
)
def test_a_broken_arrow_is_seen(path: str, line: str) -> None:
    assert len(broken_arrows(Path(path), line)) >= 1


def floor_of(path: Path, floors: list[str]) -> int:
    """The number of the wing or file a module is, the longest name that fits."""
    fits = [it for it in floors if str(path) == it or str(path).startswith(f"{it}/")]
    assert fits, f"{path} stands on no floor of its package"
    return floors.index(max(fits, key=len))


def arrows() -> Iterator[tuple[Path, Path]]:
    """Every import of one module of ours by another."""
    there = {str(path.with_suffix("")).replace("/", "."): path for path in modules()}
    for path in modules():
        for name in set(imports((ROOT / path).read_text())):
            if name in there and there[name] != path:
                yield path, there[name]


def test_arrows_between_wings_point_down() -> None:
    back = [
        f"{path} imports {other}"
        for path, other in arrows()
        if (floors := FLOORS.get(path.parts[0])) and other.parts[0] == path.parts[0]
        if path.name != "__init__.py" and other.name != "__init__.py"
        if floor_of(other, floors) > floor_of(path, floors)
    ]
    assert back == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[Path, set[Path]] = {path: set() for path in modules()}
    for path, other in arrows():
        if other.name != "__init__.py":
            graph[path].add(other)
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as circle:
        raise AssertionError(" -> ".join(map(str, circle.args[1]))) from None


def test_no_object_is_received_by_unpickling() -> None:
    for path in modules():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            assert name not in {"recv_pyobj", "send_pyobj", "allow_pickle"}, path


def test_what_tests_share_is_in_modules_that_hold_no_tests() -> None:
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]):
        for name in imports(path.read_text()):
            parts = name.split(".")
            assert parts[0] != "tests" or not any(p.startswith("test_") for p in parts), path


def test_nothing_else_stands_at_the_top() -> None:
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert names - TOP_LEVEL - {"build", "dist"} <= {
        name for name in names if name.endswith(".egg-info")
    }


def test_every_module_has_its_test() -> None:
    def test_of(path: Path) -> Path:
        return Path("tests") / path.parent / f"test_{path.name}"

    plain = [
        path
        for path in modules()
        if path.name not in ("__init__.py", "__main__.py") and str(path) not in DECLARATIONS
    ]
    missing = [str(path) for path in plain if not (ROOT / test_of(path)).exists()]
    assert missing == []


def test_functions_and_modules_fit_in_the_eye() -> None:
    too_long = []
    for path in modules():
        source = (ROOT / path).read_text()
        if source.count("\n") > MAX_LINES:
            too_long.append(f"{path}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{path}: {node.name} has {lines} lines")
    assert too_long == []


def test_the_wheel_holds_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {str(path.parent).replace("/", ".") for path in modules()}
    assert packages == set(project["tool"]["setuptools"]["packages"])
