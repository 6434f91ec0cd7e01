"""The attention contract's table: which rule holds on which kernel, as the tests found it.

    pytest -m contract --contract-csv=benchmarks/cpu/contract.csv

(With the equals sign: pytest looks for conftest.py beside what it takes for a path of tests.)
A test names the rules it checks, and its kernel if no fixture of that name gives it:

    @pytest.mark.contract("scale", "strides")
    @pytest.mark.contract("determinism", kernel="triton")

The file has one line a rule and kernel; `python -m minitx.bench table` draws it.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from minitx.bench import _common as common
from minitx.kernels import ATTENTION_KERNELS

RULES = (
    "shapes and grouped heads",
    "strides",
    "scale",
    "causal, aligned bottom-right",
    "empty rows",
    "NaN, inf and huge logits",
    "lse",
    "dtypes",
    "head dims",
    "sizes",
    "gradients",
    "determinism",
    "torch.compile and opcheck",
    "autocast and checkpointing",
    "torch.func",
    "CUDA graphs, streams, devices, threads",
    "refusals",
)
MARKER = (
    "contract(*rules, kernel=None): the rules of the attention contract that a test checks, and on "
    "which kernel; by default that of its parameter `kernel`"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--contract-csv",
        type=Path,
        metavar="FILE",
        help="write how many tests of each rule of the attention contract passed on each kernel",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    path = config.getoption("--contract-csv")
    if path is not None and not hasattr(config, "workerinput"):  # under xdist: in the controller
        config.pluginmanager.register(ContractCsv(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts a test's rules and kernel where its reports carry them, out of a worker of xdist too."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for marker in item.iter_markers("contract"):
            kernel = marker.kwargs.get("kernel", parameters.get("kernel"))
            for name, known in ((kernel, ATTENTION_KERNELS), *((r, RULES) for r in marker.args)):
                if name not in known:
                    raise pytest.UsageError(
                        f"{item.nodeid}: its mark `contract` names {name!r}, expected one of "
                        f"{', '.join(known)}"
                    )
            item.user_properties += [("contract", (rule, kernel)) for rule in marker.args]


class ContractCsv:
    """Counts the outcomes of tests, and writes them down at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[tuple[str, str, str], tuple[str, str]] = {}
        self.crashed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in ("setup", "call", "teardown"):  # a worker died, and with it the rules
            self.crashed.append(report.nodeid)
        if report.outcome == "passed" and report.when != "call":
            return
        reason = ""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        for name, value in report.user_properties:
            if name == "contract":
                rule, kernel = value
                # A teardown that fails comes last, and counts.
                self.outcomes[rule, kernel, report.nodeid] = report.outcome, reason

    def rows(self) -> list[common.Row]:
        """One for each rule and kernel that a test was about, in the order of the two lists."""
        found = {(rule, kernel) for rule, kernel, _ in self.outcomes}
        environment = common.environment_columns("cuda" if torch.cuda.is_available() else "cpu")
        rows = []
        for rule, kernel in sorted(
            found, key=lambda pair: (RULES.index(pair[0]), ATTENTION_KERNELS.index(pair[1]))
        ):
            of_pair = [x for key, x in self.outcomes.items() if key[:2] == (rule, kernel)]
            counts = Counter(outcome for outcome, _ in of_pair)
            reasons = Counter(reason for outcome, reason in of_pair if outcome == "skipped")
            rows.append(
                {
                    "rule": rule,
                    "kernel": kernel,
                    **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
                    "skip_reasons": "; ".join(f"{n} {reason}" for reason, n in reasons.items()),
                    **environment,
                }
            )
        return rows

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.crashed:
            line = f"{self.path} not written: a worker crashed in {', '.join(self.crashed)}"
        elif not self.outcomes:
            line = f"{self.path} not written: no test of the attention contract ran"
        else:
            rows = self.rows()
            common.write_csv(self.path, rows)
            line = f"{self.path} written: {len(rows)} lines"
        terminalreporter.write_line(line)
