"""python -m minitx.bench COMMAND ...: benchmarks that check a result before they time it.

A command is a module of this package with a function `main(argv) -> exit code`.
"""

import importlib
import sys

COMMANDS = {
    "softmax": "row softmax, forward and backward, beside PyTorch, peers and copy bandwidth",
    "attention": "attention by length, forward, backward and both, beside peers",
    "train": "train.py by kernel, compiled or not, beside nanoGPT's model",
    "eval": "one CSV and picture from what eval.py wrote, one run a kernel",
    "auto": "the table that kernel 'auto' chooses by, from a CSV of attention",
    "table": "Markdown tables from the CSV files of the others, as in README.md",
}

USAGE = "usage: python -m minitx.bench {" + ",".join(COMMANDS) + "} [--help] [flags]"

EXIT_CODES = """exit codes: 0 done; 2 a mistake in the flags; 3 a kernel of minitx failed or was
            wrong; 6 the disk is full or fails"""


def main(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        for name, description in COMMANDS.items():
            print(f"  {name:10} {description}")
        print(EXIT_CODES)
        return 0
    if not argv or argv[0] not in COMMANDS:
        found = f"unknown command '{argv[0]}'" if argv else "no command"
        print(
            f"minitx.bench: error: {found}; expected one of {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    return importlib.import_module(f"minitx.bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
