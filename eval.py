"""Perplexity of a trained model by context length, on any kernel, with parity.

    python eval.py --checkpoint runs/triton --context_lengths 1024,4096,16384
    python eval.py --checkpoint runs/triton --kernel tilelang --compare eager
    python eval.py --checkpoint runs/triton --context_lengths 32768 --rope_scaling yarn
    python eval.py --checkpoint runs/triton --data.source book.txt --prefill_chunk 4096
    python eval.py --checkpoint runs/triton --task passkey --context_lengths 1024,4096
    python eval.py --checkpoint models/SmolLM2-135M --data.source book.txt

Writes eval.json and eval.png to eval/ in the run's folder, or to --out_dir. Exit code 3: the kernel
does not give what --compare gives, within its error budget; 4: a later token moves an earlier loss.
`--help` explains every setting and exit code.
"""

import signal
import sys

if __name__ == "__main__":  # until the run takes signals itself, Ctrl-C just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from minitx.cli import run_cli
from minitx.eval_config import EvalConfig
from minitx.evaluation import evaluate

DESCRIPTION = """Perplexity of a trained model by context length. Exit codes: 0 done; 1 out of
memory at every length; 2 a mistake in the settings; 3 no parity; 4 a later token moves an earlier
loss; 6 the disk is full or fails; 130 stopped by a signal, with what was finished written."""

if __name__ == "__main__":
    sys.exit(
        run_cli(
            evaluate,
            EvalConfig,
            prog="eval.py",
            description=DESCRIPTION,
        )
    )
