"""python -m minitx.bench softmax: the row softmax, forward and backward, by width.

Each result is first checked on some rows against float64, then timed. What counts is the rate of
the bytes that must move: forward one read and one write of the tensor, backward two reads and one
write, causal rows read only where they are visible; beside it stands what a plain copy reaches on
the same machine. Writes softmax.csv and softmax.png to --out_dir and prints tables, one of them of
what the causal rule saves in time. Runs are timed as those of attention are, whose --help says how.

Columns of softmax.csv, a row for each kernel, tensor and direction:

    kernel, dtype, direction, is_causal
    rows, columns           of the tensor; a causal one is of square matrices
    bytes                   that must move, read and written
    status                  ok, or why there are no figures
    median_ms, p20_ms, p80_ms   of a call: the median run, 20th and 80th percentile
    late_share              of the runs, the part that the host launched late; above 0.5 they count
    tb_per_s                bytes by the median, in 1e12 a second
    first_call_s            seconds of the first call, with its compiles where nothing is cached
    peak_gib                that a call allocates at its peak beyond what was allocated before
    max_error, error_budget against float64: the worst of result and gradient, and how much is
                            allowed
    copy_tb_per_s           what a copy on this machine reads and writes, likewise
    device, torch, triton, tilelang, commit     where the row comes from
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from minitx.bench import _common as common
from minitx.bench import softmax_report, timing
from minitx.cli import EXIT_PARITY_FAILED, run_cli
from minitx.config import refuse_nothing
from minitx.kernels import SOFTMAX_KERNELS, softmax, softmax_reference, supports_softmax
from minitx.kernels.reference import causal_mask
from minitx.metrics import is_out_of_memory
from minitx.testing import error_budget, max_error

PEERS = ("torch", "torch.compile", "quack")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DIRECTIONS = ("forward", "backward", "both")
CHECKED_ROWS = 16
MEASURED = (
    "median_ms",
    "p20_ms",
    "p80_ms",
    "late_share",
    "tb_per_s",
    "first_call_s",
    "peak_gib",
    "max_error",
    "error_budget",
)

# By device. The GPU's tensors are some times its L2 cache; the CPU's suit an interpreter.
WIDTHS = {
    "cuda": [128 * 2**i for i in range(14)],  # 128 to 1,048,576
    "cpu": [128, 1000, 20000],
}
ELEMENTS = {"cuda": 2**27, "cpu": 2**16}
# Wider than this a causal matrix is no longer square: it would not fit in memory.
MAX_CAUSAL_WIDTH = {"cuda": 32768, "cpu": 256}
QUACK_DEVICE, QUACK_MAX_WIDTH = "cuda", 131072

Softmax = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class SoftmaxBenchConfig:
    """What to measure.

    Args:
        kernels: any of triton, tilelang, eager, torch, torch.compile, quack, with commas between;
            empty: all that run here (torch.compile on a GPU only).
        dtypes: any of float32, float16, bfloat16.
        widths: columns a row; empty: 128 to 1M on a GPU, three small ones on a CPU.
        elements: elements in a tensor, so that there are elements // width rows; default: 2**27
            on a GPU, 2**16 on a CPU. Causal matrices are square, whatever that takes.
        causal: any of false and true.
        budget_ms: milliseconds of measuring a result.
        device: cuda or cpu; default: the GPU if there is one.
        out_dir: folder for softmax.csv and softmax.png.
        overwrite: replace files that are there already.
    """

    kernels: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16", "float32"])
    widths: list[int] = field(default_factory=list)
    elements: int | None = None
    causal: list[bool] = field(default_factory=lambda: [False, True])
    budget_ms: float = 100.0
    device: str | None = None
    out_dir: str = "runs/bench"
    overwrite: bool = False


@dataclass
class Case:
    """One tensor to measure on: [matrices, rows a matrix, width]."""

    dtype: str
    is_causal: bool
    width: int
    elements: int
    device: str

    @property
    def shape(self) -> tuple[int, int, int]:
        rows = max(self.elements // self.width, 1)
        if not self.is_causal:
            return 1, rows, self.width
        return max(rows // self.width, 1), self.width, self.width

    def bytes_that_must_move(self, direction: str) -> int:
        matrices, rows, width = self.shape
        whole = matrices * rows * width
        read = matrices * width * (width + 1) // 2 if self.is_causal else whole
        forward, backward = read + whole, 2 * read + whole
        elements = {"forward": forward, "backward": backward, "both": forward + backward}
        return elements[direction] * DTYPES[self.dtype].itemsize


def make_softmax(kernel: str, case: Case) -> Softmax:
    """The function to time: [..., N] -> [..., N]."""
    if kernel in SOFTMAX_KERNELS:
        return lambda x: softmax(x, is_causal=case.is_causal, kernel=kernel)
    if kernel == "quack":
        quack = _quack_softmax()
        assert quack is not None, "why_not was not asked"
        return lambda x: quack(x.flatten(0, -2)).view(x.shape)
    if case.is_causal:
        masked = ~causal_mask(*case.shape[1:], case.device)
        function: Softmax = lambda x: torch.softmax(x.masked_fill(masked, float("-inf")), -1)  # noqa: E731
    else:
        function = lambda x: torch.softmax(x, -1)  # noqa: E731
    if kernel == "torch.compile":
        torch._dynamo.reset()  # a fresh compilation for each case, none generalised
        return torch.compile(function, dynamic=False)
    return function


def why_not(kernel: str, device: str, is_causal: bool = False, width: int = 1) -> str | None:
    """Why a kernel or peer cannot be measured here, or None."""
    if kernel in SOFTMAX_KERNELS:
        return supports_softmax(kernel, torch.empty(1, 1, device=device)).reason or None
    if kernel == "quack":
        if is_causal:
            return "it has no causal softmax"
        if width > QUACK_MAX_WIDTH:
            return "a cluster has no room for a row of y and one of dy"
        if device != QUACK_DEVICE:
            return "it runs on GPUs only"
        if _quack_softmax() is None:
            return "the package quack cannot be imported"
    return None


def _quack_softmax() -> Softmax | None:
    """The softmax of the package quack ([rows, N] -> [rows, N]), where it is installed."""
    try:
        from quack.softmax import softmax as quack  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return quack


def check_rows(case: Case, x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor):
    """(error, budget) of y and dx, the worse of the two, on rows from the first to the last.

    The budget is the tests': twice the error of torch.softmax in the same dtype, and one rounding.
    """
    matrices, rows, width = case.shape
    chosen = torch.linspace(0, matrices * rows - 1, CHECKED_ROWS).long().unique().to(x.device)
    scores, dy, y, dx = (t.detach().view(-1, width)[chosen] for t in (x, dy, y, dx))
    if case.is_causal:
        columns = torch.arange(width, device=x.device)
        masked = columns > (chosen % rows + width - rows)[:, None]
        scores = scores.masked_fill(masked, float("-inf"))
    worst = (0.0, 1.0)
    exact = _values_and_gradient(softmax_reference, scores.double(), dy.double())
    torchs = _values_and_gradient(lambda x: torch.softmax(x, -1), scores, dy)
    for ours, truth, baseline in zip((y, dx), exact, torchs, strict=True):
        error, budget = max_error(ours, truth), error_budget(baseline, truth, x.dtype)
        worst = max(worst, (error, budget), key=lambda pair: pair[0] / pair[1])
    return worst


def _values_and_gradient(function: Softmax, x: torch.Tensor, dy: torch.Tensor):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def measure_kernel(kernel: str, case: Case, budget_ms: float) -> list[common.Row]:
    """A row for each direction; a kernel that cannot, runs out of memory or is wrong has rows that
    say so."""
    reason = why_not(kernel, case.device, case.is_causal, case.width)
    if reason is not None:
        return [_row(kernel, case, direction, reason) for direction in DIRECTIONS]
    try:
        return _measure_kernel(kernel, case, budget_ms)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        out_of_memory = is_out_of_memory(error)
        status = "out of memory" if out_of_memory else f"failed: {str(error).splitlines()[0]}"
    common.free_memory(case.device)
    return [_row(kernel, case, direction, status) for direction in DIRECTIONS]


def _measure_kernel(kernel: str, case: Case, budget_ms: float) -> list[common.Row]:
    generator = torch.Generator(case.device).manual_seed(0)
    x, dy = (
        torch.randn(case.shape, generator=generator, device=case.device, dtype=DTYPES[case.dtype])
        for _ in range(2)
    )
    x.requires_grad_()
    function = make_softmax(kernel, case)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return function(x)

    graph: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        return torch.autograd.grad(graph[0], x, dy, retain_graph=True)[0]

    def both() -> torch.Tensor:
        return torch.autograd.grad(function(x), x, dy)[0]

    def first_backward() -> torch.Tensor:
        graph.append(function(x))  # torch.compile compiles its forward anew for a gradient
        return backward()

    first_call = {"forward": timing.first_call_seconds(forward, case.device)}
    first_call["backward"] = timing.first_call_seconds(first_backward, case.device)
    first_call["both"] = first_call["forward"] + first_call["backward"]
    error, budget = check_rows(case, x, dy, graph[0], backward())
    checked = {"max_error": error, "error_budget": budget}
    if not error <= budget:
        return [_row(kernel, case, d, "wrong", **checked) for d in DIRECTIONS]
    rows = []
    for direction, call in (("forward", forward), ("backward", backward), ("both", both)):
        peak = common.peak_gib(call, case.device)
        measured = timing.measure(call, case.device, budget_ms)
        rate = common.terabytes_per_s(case.bytes_that_must_move(direction), measured.median_ms)
        rows.append(
            _row(
                kernel,
                case,
                direction,
                "ok",
                **vars(measured),
                tb_per_s=rate,
                first_call_s=first_call[direction],
                peak_gib=peak,
                **checked,
            )
        )
    return rows


def _row(kernel: str, case: Case, direction: str, status: str, **measured) -> common.Row:
    matrices, rows, width = case.shape
    empty = dict.fromkeys(MEASURED)
    return {
        "kernel": kernel,
        "dtype": case.dtype,
        "direction": direction,
        "is_causal": case.is_causal,
        "rows": matrices * rows,
        "columns": width,
        "bytes": case.bytes_that_must_move(direction),
        "status": status,
        **empty,
        **measured,
    }


def run(config: SoftmaxBenchConfig) -> int:
    device = common.check_device(config.device)
    refuse_nothing({"--budget_ms": config.budget_ms})
    kernels = _kernels(config, device)
    for dtype in config.dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"--dtypes: unknown '{dtype}'; expected any of {', '.join(DTYPES)}")
    widths = config.widths or WIDTHS[device]
    elements = ELEMENTS[device] if config.elements is None else config.elements
    if min([*widths, elements]) < 1:
        raise ValueError("--widths and --elements must be 1 or more")
    cases = [
        Case(dtype, is_causal, width, elements, device)
        for dtype in config.dtypes
        for is_causal in config.causal
        for width in widths
        if not is_causal or width <= MAX_CAUSAL_WIDTH[device]
    ]
    names = ("softmax.csv", "softmax.png")
    with common.out_folder(config.out_dir, names, config.overwrite) as folder:
        rows = measure_into(folder, config, device, cases, kernels)
    return EXIT_PARITY_FAILED if _report_failures(rows) else 0


def measure_into(
    folder: Path,
    config: SoftmaxBenchConfig,
    device: str,
    cases: Sequence[Case],
    kernels: Sequence[str],
) -> list[common.Row]:
    """Measures, prints, and leaves softmax.csv and softmax.png; returns the rows."""
    csv_path, png_path = folder / "softmax.csv", folder / "softmax.png"
    copy = timing.copy_bandwidth(device, config.budget_ms)
    about = {"copy_tb_per_s": copy, **common.environment_columns(device)}
    print(f"{about['device']}: copy {copy:.3g} TB/s, read and written")
    rows: list[common.Row] = []
    for case in tqdm(cases, unit="case", disable=None):
        for kernel in kernels:
            rows += [row | about for row in measure_kernel(kernel, case, config.budget_ms)]
        common.write_csv(csv_path, rows)  # what is measured is kept, whatever comes after
    for title, header, lines in softmax_report.tables(rows):
        print(f"\n{title}\n{common.format_table(header, lines)}")
    for r in rows:
        if note := timing.late_note(r):
            print(f"{r['kernel']} {r['dtype']} {r['direction']} {r['columns']}: {note}")
    softmax_report.plot(csv_path, png_path)
    print(f"\nwrote {csv_path} and {png_path}")
    return rows


def _kernels(config: SoftmaxBenchConfig, device: str) -> list[str]:
    known = [*PEERS, *SOFTMAX_KERNELS[1:]]
    if not config.kernels:
        wanted = ["torch", "torch.compile", "quack", "triton", "tilelang"]
        if device == "cpu":
            wanted.remove("torch.compile")
        return [kernel for kernel in wanted if why_not(kernel, device) is None]
    for kernel in config.kernels:
        if kernel not in known:
            raise ValueError(f"--kernels: unknown '{kernel}'; expected any of {', '.join(known)}")
    return config.kernels


def _report_failures(rows: list[common.Row]) -> bool:
    """Names what went wrong, once each; true if that was a kernel of this project."""
    bad = [r for r in rows if r["status"] == "wrong" or r["status"].startswith("failed")]
    for r in bad:
        print(f"{r['kernel']} {r['dtype']} {r['direction']} {r['columns']}: {r['status']}")
    return any(r["kernel"] in SOFTMAX_KERNELS for r in bad)


def main(argv: list[str]) -> int:
    argv = common.bracket_lists(argv, SoftmaxBenchConfig)
    return run_cli(
        run, SoftmaxBenchConfig, argv, prog="minitx.bench softmax", description=__doc__ or ""
    )
