"""Each change is one and leaves code; a seed draws the same mutants; trials say who noticed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.mutants.__main__ import main
from tests.mutants.changes import changes, members_of_enums
from tests.mutants.mutant import Mutant, drawn
from tests.mutants.trial import HANG, Tree, Verdict, stages_of

ROOT = Path(__file__).resolve().parents[2]
COLOURS = b"class Colour(IntEnum):\n    RED = 1\n    BLUE = 2\n    GREEN = 3\n"


def made(source: str) -> list[str]:
    enums = members_of_enums([COLOURS])
    return [it.made_in(source.encode()).decode() for it in changes(source.encode(), enums)]


@pytest.mark.parametrize(
    ("source", "results"),
    [
        ("a == b", {"a != b"}),
        ("a not in b", {"a in b"}),
        ("a < b <= c", {"a <= b <= c", "a >= b <= c", "a < b < c", "a < b > c"}),
        ("a and b and c", {"a or b and c", "a and b or c"}),
        ("(a) or (not b)", {"(a) and (not b)", "(a) or (b)"}),
        ("a + b * c", {"a - b * c", "a + b // c"}),
        ("a = 2", {"a = 3", "a = 1"}),
        ("a = True", {"a = False"}),
        ("a = Colour.GREEN", {"a = Colour.RED"}),
        ("f(ü, g[x], y)", {"pass", "f(g[x], ü, y)"}),
        ("a.b = c", {"pass"}),
        ("a[b] += c", {"pass"}),
        ("if a: b", {"if not (a): b"}),
        ("a = [b for b in c if d(b)]", {"a = [b for b in c if not (d(b))]"}),
        (
            "def f() -> bool:\n    return a",
            {f"def f() -> bool:\n    return {it}" for it in (True, False)},
        ),
        ("def f() -> str:\n    return a", {'def f() -> str:\n    return ""'}),
        ("def f():\n    return a", {"def f():\n    return None"}),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_the_changes_of_a_place(source: str, results: set[str]) -> None:
    assert set(made(source)) == results and len(made(source)) == len(results)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 1 line."""',
        "MAX_BYTES: Final = 4 << 20",
        "a: Annotated[int, Meta(ge=1)] = b",
        "def f(a: Literal[1]) -> Literal[2]:\n    raise a",
        "class A(Protocol):\n    def f(self, a: int = 1) -> int: ...",
        "@dataclass(frozen=True)\nclass A(Struct, gc=False): ...",
        "class A:\n    def __repr__(self) -> str:\n        return f(1, 2)",
        "class A:\n    def __init__(self) -> None:\n        self.a = b",
        "assert a == 1, b + 2",
        "_LOG.info('listening', port=1)",
        'a = f"{b + 1} of {c}"',
        "a = zip(b, strict=True)",
        "if TYPE_CHECKING:\n    import a",
        'a = "of " + b',
        "a = min(b, c)",
    ],
)
def test_text_types_and_tuned_numbers_are_left_alone(source: str) -> None:
    assert made(source) == []


@pytest.mark.full("it reads every file twice")
def test_a_seed_draws_the_same_mutants_of_all_wings() -> None:
    one, again, other = (list(itertools.islice(drawn(ROOT, seed), 60)) for seed in (7, 7, 8))
    assert one == again != other
    num_wings = len({mutant.wing for mutant in one})
    assert num_wings > 20
    assert len({mutant.wing for mutant in one[:num_wings]}) == num_wings
    assert len(set(one)) == 60


def test_tests_of_a_module_come_before_those_of_its_wing() -> None:
    stages = stages_of(ROOT, Path("wire/aio/tls.py"))
    assert stages["module"] == ["tests/wire/aio/test_tls.py"]
    assert "tests/wire/aio/test_listener.py" in stages["wing"], "wire.aio.listener imports it"
    assert not {"tests/wire/aio/test_tls.py", "tests/wire/aio/test_zap.py"} & {*stages["wing"]}
    assert stages_of(ROOT, Path("kernels/__init__.py")).keys() == {"wing"}


MODULE = """\
def twice(number):
    return number + number


def half(number):
    return number // 2


def noted(number, notes):
    notes.add(number)
    return number


def slow(number):
    while number > 0:
        number -= 1
    return number
"""
TESTS = {
    "test_numbers.py": """\
from wire.numbers import half, slow, twice

import pytest

@pytest.mark.parametrize("nothing", [b"\\x00"])
def test_four(nothing: bytes) -> None:
    assert twice(2) == 4 and slow(2) == 0
""",
    "test_others.py": """\
from wire.numbers import half

def test_three() -> None:
    assert half(6) == 3
""",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "__init__.py").touch()
    (tmp_path / "wire" / "numbers.py").write_text(MODULE)
    (tmp_path / "tests" / "wire").mkdir(parents=True)
    for name, text in TESTS.items():
        (tmp_path / "tests" / "wire" / name).write_text(text)
    return tmp_path


def mutant_of(root: Path, old: str, new: str) -> Mutant:
    (found,) = (it for it in drawn(root, 1) if (it.old, it.change.text) == (old, new))
    return found


def test_the_verdict_names_the_test_that_noticed(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tree = Tree(root, tmp_path_factory.mktemp("copies") / "0")
    of_module = "tests/wire/test_numbers.py::test_four[\\x00]"
    of_wing = "tests/wire/test_others.py::test_three"
    for old, new, verdict in (
        ("+", "-", Verdict(of_module, "module")),
        ("//", "*", Verdict(of_wing, "wing")),
        ("notes.add(number)", "pass", Verdict()),
    ):
        assert tree.judge(mutant_of(root, old, new)) == verdict
    assert (root / "wire" / "numbers.py").read_text() == MODULE


def test_a_mutant_that_hangs_is_noticed(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutants.trial.TEST_S", 2)
    tree = Tree(root, tmp_path_factory.mktemp("copies") / "0")
    verdict = tree.judge(mutant_of(root, "number -= 1", "pass"))
    assert verdict == Verdict(HANG, "module")


def test_the_command_lists_judges_and_counts(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.mutants.__main__.ROOT", root)
    assert main(["--list", "--count", "3"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 3 and all(line.startswith("wire/numbers.py:") for line in listed)
    assert main(["--place", "wire/numbers.py:10", "--jobs", "1"]) == 1, "it survives"
    assert "SURVIVED wire/numbers.py:10 statement dropped: notes" in capsys.readouterr().out
