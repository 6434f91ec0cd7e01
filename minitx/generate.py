"""Text from a trained model, token by token.

    python -m minitx.generate --checkpoint runs/triton --prompt "def main(" --kernel sdpa

The prompt and what follows it go to stdout as they come, one line of figures to stderr. `generate`
is the same as a function that yields token ids.
"""

import codecs
import io
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # until there is text to end, Ctrl-C just ends the process
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.nn.functional as F

from minitx.checkpoint import CheckpointError
from minitx.cli import run_cli
from minitx.config import refuse_empty
from minitx.model import GPT, KVCache
from minitx.tokenizer import Tokenizer, load_tokenizer
from minitx.trained import find_trained, load_trained
from minitx.trainer import resolve_device, resolve_dtype

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
# On a terminal a control character is shown as its picture: an untrained model writes escape codes.
CONTROL_PICTURES = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"}
CONTROL_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclass
class GenerateConfig:
    """Continue a text with a trained model."""

    checkpoint: str
    """Run folder (its latest checkpoint), a checkpoint folder, or a Hugging Face folder."""
    prompt: str = ""
    """Text to go on from; empty starts a new document."""
    kernel: str = "auto"
    """Attention kernel: eager, sdpa, triton-softmax, tilelang-softmax, triton, tilelang or auto."""
    max_tokens: int = 256
    """Most tokens to write; an end-of-text token ends it sooner."""
    temperature: float = 1.0
    """Divides the logits: below 1 safer, above 1 wilder; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens only."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that together have this probability, in (0, 1]."""
    seed: int = 0
    """Seed of the draws; one seed gives one text."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Of weights and cache. auto: bfloat16 on a GPU (float16 before compute capability 8.0),
    float32 on a CPU."""
    use_cache: bool = True
    """Keep keys and values of what was read; false reads everything again for each token."""


def generate(
    model: GPT,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    use_cache: bool = True,
    vocab_size: int | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields the ids that follow `tokens`, each as soon as it is drawn.

    Args:
        model: in evaluation mode. A rotary model is stretched to the length that is needed.
        tokens: ids of the prompt, one at least.
        max_tokens: most ids to yield. Learned positions end it where they are full: `room` says
            after how many.
        temperature, top_k, top_p, use_cache: as in GenerateConfig.
        seed: of the draws; the global random state is left alone.
        vocab_size: ids from here on are never drawn (rows that pad the embedding).
        stop: an id that ends the text; it is yielded too.

    Raises ValueError, before the first id, for a setting or a prompt that does not fit, and while
    it runs for logits that are not finite.
    """
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if not tokens:
        raise ValueError("the prompt has no token; start from the end-of-text token")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    sampler = Sampler(temperature, top_k, top_p, seed)
    if room(model, len(tokens)) < 1:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens is beyond the {model.max_context} learned positions "
            "of this model; shorten it"
        )
    # An inner generator: this function's errors come when it is called, not at the first id.
    return _stream(model, list(tokens), max_tokens, sampler, use_cache, vocab_size, stop)


def room(model: GPT, prompt_tokens: int) -> int:
    """How many tokens can follow a prompt. The last is never read, and so needs no position."""
    return sys.maxsize if model.rope is not None else model.max_context + 1 - prompt_tokens


def _stream(
    model: GPT,
    tokens: list[int],
    max_tokens: int,
    sampler: "Sampler",
    use_cache: bool,
    vocab_size: int | None,
    stop: int | None,
) -> Iterator[int]:
    weight = model.tok_embd.weight
    max_tokens = min(max_tokens, room(model, len(tokens)))
    length = len(tokens) + max_tokens - 1
    model.extend_context(length)
    cache = None
    if use_cache:
        cache = KVCache(model.config, 1, length, device=weight.device, dtype=weight.dtype)
    unread = tokens
    for _ in range(max_tokens):
        token = sampler.draw(_next_logits(model, unread, cache)[:vocab_size])
        yield token
        if token == stop:
            return
        unread = [token] if use_cache else [*unread, token]


@torch.no_grad()
def _next_logits(model: GPT, tokens: list[int], cache: KVCache | None) -> torch.Tensor:
    """[V]: the logits of what follows the last token; those of the others are not made."""
    weight = model.output_weight
    hidden = model.hidden(torch.tensor([tokens], device=weight.device), cache)
    return F.linear(hidden[0, -1], weight)


class Sampler:
    """Draws ids by softmax(logits / temperature), cut to the top_k likeliest, and of those to the
    fewest that together have probability top_p (nucleus sampling, Holtzman et al. 2020,
    arXiv:1904.09751).

    A draw takes one uniform number, on the CPU in float64, so that a seed means the same on every
    device. Temperature 0 takes the likeliest.
    """

    def __init__(self, temperature: float, top_k: int | None, top_p: float, seed: int) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature must be a finite number from 0 on, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2**63 - 1, got {seed}")
        self.temperature, self.top_p = temperature, top_p
        self.top_k = 1 if temperature == 0 else top_k
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, logits: torch.Tensor) -> int:
        """An id in [0, V) from logits [V]. Raises ValueError for logits that hold NaN or +inf."""
        ids = None
        if self.top_k is not None or self.top_p < 1:  # only then does their order matter
            logits, ids = logits.topk(min(self.top_k or len(logits), len(logits)))
        logits = logits.double().cpu()
        largest = logits.max()
        if not largest.isfinite():
            raise ValueError(
                f"the model's largest logit is {largest.item()}; try --dtype float32 or "
                "--kernel eager"
            )
        # The largest goes to 0 before it is divided, so no temperature is too small.
        scaled = (logits - largest) / (self.temperature or 1.0)
        cumulative = scaled.softmax(0).cumsum(0)
        if self.top_p < 1:
            cumulative = cumulative[: int(torch.searchsorted(cumulative, self.top_p)) + 1]
        point = torch.rand((), generator=self.generator, dtype=torch.float64) * cumulative[-1]
        choice = min(int(torch.searchsorted(cumulative, point, right=True)), len(cumulative) - 1)
        return choice if ids is None else int(ids[choice])


def find_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder: beside its files, or in the run folder around it."""
    places = [checkpoint / "tokenizer.json"]
    if checkpoint.parent.name == "checkpoints":
        places.append(checkpoint.parent.parent / "tokenizer.json")
    for path in places:
        if path.is_file():
            return load_tokenizer(path)
    raise CheckpointError(f"{places[-1]}: no such file; copy the model's tokenizer.json there")


def write_stream(pieces: Iterator[bytes]) -> None:
    """Writes UTF-8 to stdout as it comes: a character goes out when its last byte is there."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pictures = CONTROL_PICTURES if sys.stdout.isatty() else {}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no "é" shows "?"
    try:
        for piece in pieces:
            sys.stdout.write(decoder.decode(piece).translate(pictures))
            sys.stdout.flush()
    finally:
        sys.stdout.write(decoder.decode(b"", final=True) + "\n")
        sys.stdout.flush()


def generate_text(config: GenerateConfig) -> int:
    """Runs the command; returns its exit code."""
    refuse_empty({"--checkpoint": config.checkpoint})
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    checkpoint = find_trained(Path(config.checkpoint))
    tokenizer = find_tokenizer(checkpoint)
    model, _ = load_trained(checkpoint, kernel=config.kernel, device=device, dtype=dtype)
    # Bytes that are no UTF-8 reach argv as surrogates, and go back to what they were.
    prompt = config.prompt.encode("utf-8", "surrogateescape")
    tokens = tokenizer.encode(prompt).tolist() or [tokenizer.eot]
    new = generate(
        model,
        tokens,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        use_cache=config.use_cache,
        vocab_size=tokenizer.vocab_size,
        stop=tokenizer.eot,
    )
    written: list[int] = []

    def pieces() -> Iterator[bytes]:
        first = next(
            new
        )  # ahead of the text: what the first call has to say, it says on a terminal
        yield prompt
        for token in itertools.chain([first], new):
            written.append(token)
            yield tokenizer.decode([token])

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.perf_counter()
    try:
        write_stream(pieces())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    seconds = time.perf_counter() - start
    if len(written) == room(model, len(tokens)) and written[-1] != tokenizer.eot:
        _note(f"stopped: the {model.max_context} learned positions of this model are full")
    elif len(tokens) + len(written) > model.config.max_seq_len:
        _note(f"beyond {model.config.max_seq_len} tokens: longer than the model was trained on")
    rate = len(written) / seconds
    _note(f"{len(written)} tokens, {rate:.1f} tok/s with the prompt, kernel {config.kernel}")
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(
        generate_text,
        GenerateConfig,
        argv,
        prog="python -m minitx.generate",
        description="Continue a text with a trained model.",
    )


if __name__ == "__main__":
    sys.exit(main())
