"""How long a first step takes, from the start of a process of its own: imports, compiles, launches.

python -m minitx.bench.start KERNEL '{"batch": 2, ...}'     # such a process; started from here,
                                                            # it ends when its input does
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch

from minitx.bench.attention_variants import Case, make_variant

# Where compilers keep what they made.
CACHES = (
    "TILELANG_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
)
DONE = "first step done"


def start_ms(kernel: str, case: Case, folder: Path, is_warm: bool) -> float:
    """Milliseconds until a new process has made a forward and a backward, with empty caches or, if
    is_warm, with those that an earlier one left in `folder`.

    Raises RuntimeError with what the process says last if it fails.
    """
    if not is_warm:
        shutil.rmtree(folder, ignore_errors=True)  # there may be none
    elif not folder.exists():
        start_ms(kernel, case, folder, is_warm=False)
    caches = {name: folder / name.lower() for name in CACHES}
    for path in caches.values():
        path.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {name: str(path) for name, path in caches.items()}
    command = [sys.executable, "-m", "minitx.bench.start", kernel, json.dumps(asdict(case))]
    said: list[str] = []
    milliseconds = None
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,  # whose end tells it that this process is gone
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == DONE:
                milliseconds = (time.perf_counter() - started) * 1e3
            elif line.strip():
                said.append(line.strip())
    # What compiles in the background has ended with the process, and is in the caches.
    if process.returncode != 0 or milliseconds is None:
        raise RuntimeError(f"a new process failed: {said[-1] if said else process.returncode}")
    return milliseconds


def end_with_stdin() -> None:
    """Ends this process when what it reads from ends: one that hangs must not outlive, with a GPU
    in its hands, a caller that was killed for it."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(kernel: str, case_json: str) -> None:
    fields = json.loads(case_json)
    case = Case(**fields | {"passes": tuple(fields["passes"])})  # which JSON made a list
    variant = make_variant(kernel, case)
    *inputs, dout = (variant.own_layout(t) for t in case.make_inputs())
    leaves = [t.requires_grad_() for t in inputs]
    with variant.pinned():
        # A loss of one element, as training has: for a gradient that is given PyTorch imports
        # SymPy first, which is no kernel's doing and takes longer than TileLang's own import.
        torch.autograd.grad((variant.call(*leaves) * dout).sum(), leaves)
    if case.device == "cuda":
        torch.cuda.synchronize()
    print(DONE, flush=True)


if __name__ == "__main__":
    end_with_stdin()
    main(*sys.argv[1:])
