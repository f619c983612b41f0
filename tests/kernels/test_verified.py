"""kernels/verified.json is well-formed and kernels/README.md says what it says.

Which kernels are new or have changed since a GPU last ran them is reported (`pytest -rP`), and no
failure: whoever changes a kernel need not have a GPU.
"""

from tests.gpu import record


def test_the_file_speaks_of_kernels_that_exist() -> None:
    it = record.read()  # raises and says what is wrong
    for kernel in record.sources():
        print(f"{kernel}: {record.state_of(kernel, it)}")  # noqa: T201
    assert record.sources().keys() >= it.kernels.keys()


def test_the_readme_has_the_table_of_now() -> None:
    text = record.README.read_text(encoding="utf-8")
    is_now = record.with_table(text, record.read()) == text
    assert is_now, "write the table anew: scripts/gpu_check --readme"
