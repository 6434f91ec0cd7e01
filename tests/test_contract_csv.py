"""`pytest --contract-csv`: what it counts, also under xdist, and what it refuses."""

from pathlib import Path

import pytest

from minitx.bench._common import read_csv
from minitx.metrics import git_commit

TESTS = """
import os

import pytest


@pytest.fixture(params=["eager", "sdpa"])
def kernel(request):
    return request.param


@pytest.fixture
def lse_kernel(kernel):
    if kernel == "sdpa":
        pytest.skip("returns no lse")
    return kernel


@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the teardown")


@pytest.mark.contract("scale", "strides")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_right_but_for_one(kernel, n):
    assert (kernel, n) != ("sdpa", 2)


@pytest.mark.contract("lse")
def test_not_for_all(lse_kernel):
    pass


@pytest.mark.contract("scale")
def test_fails_after_it_passed(kernel, broken):
    pass


@pytest.mark.contract("sizes", kernel="triton")
def test_of_one_kernel():
    pass


def test_of_no_rule(kernel):
    assert False
"""
CRASH = """

@pytest.mark.contract("sizes", kernel="eager")
def test_that_kills_its_process():
    os._exit(1)
"""
# rule, kernel -> passed, failed, skipped, reasons
EXPECTED = {
    ("strides", "eager"): ("3", "0", "0", ""),
    ("strides", "sdpa"): ("2", "1", "0", ""),
    ("scale", "eager"): ("3", "1", "0", ""),
    ("scale", "sdpa"): ("2", "2", "0", ""),
    ("lse", "eager"): ("1", "0", "0", ""),
    ("lse", "sdpa"): ("0", "0", "1", "1 returns no lse"),
    ("sizes", "triton"): ("1", "0", "0", ""),
}


XDIST = ("-p", "xdist", "-n", "1")
CONFTEST = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
pytest_plugins = ["contract_csv"]
"""


@pytest.fixture
def run(pytester):
    """Runs tests of this text with --contract-csv table.csv; returns what is printed."""

    def run(text: str, *arguments: str) -> str:
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(text)
        arguments = ("--strict-markers", "--contract-csv=table.csv", *arguments)
        result = pytester.runpytest_inprocess(*arguments)
        return str(result.stdout) + str(result.stderr)

    return run


@pytest.mark.parametrize("workers", [(), XDIST], ids=["one-process", "xdist"])
def test_outcomes_by_rule_and_kernel(run, pytester, workers):
    assert "table.csv written: 7 lines" in run(TESTS, *workers)
    rows = read_csv(pytester.path / "table.csv")
    counts = ("passed", "failed", "skipped", "skip_reasons")
    found = {(r["rule"], r["kernel"]): tuple(r[name] for name in counts) for r in rows}
    assert found == EXPECTED
    assert list(found) == list(EXPECTED)
    assert {r["commit"] for r in rows} == {git_commit() or ""}
    assert all(r["device"] and r["torch"] for r in rows)


def test_a_crash_leaves_no_table(run, pytester):
    output = run(TESTS + CRASH, *XDIST, "--max-worker-restart", "0")
    assert "table.csv not written: a worker crashed in " in output
    assert not (pytester.path / "table.csv").exists()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"scale", "strides"', '"scael"', "names 'scael', expected one of shapes and"),
        (', kernel="triton"', "", "names None, expected one of "),
        (', kernel="triton"', ', kernel="fast"', "names 'fast', expected one of "),
    ],
    ids=["rule", "no-kernel", "kernel"],
)
def test_marks_that_are_mistaken(run, before, after, message):
    assert before in TESTS
    output = run(TESTS.replace(before, after))
    assert message in output
    assert "Traceback" not in output


def test_no_test_of_the_contract(run):
    output = run("def test_nothing(): pass")
    assert "table.csv not written: no test of the attention contract ran" in output
