"""EvalConfig: everything `eval.py` can be told. The docstring under a field is its --help."""

from dataclasses import dataclass, field
from typing import Literal

from minitx.config import refuse_empty
from minitx.eval_data import EvalDataConfig
from minitx.passkey import PasskeyConfig
from minitx.rope import RopeScaling
from minitx.windows import check_stride, default_stride


@dataclass
class EvalConfig:
    """Perplexity by context length, on any kernel, with parity."""

    checkpoint: str
    """Run folder (its latest checkpoint), a checkpoint folder, or a Hugging Face folder."""
    kernel: str = "auto"
    """Attention kernel: eager, sdpa, triton-softmax, tilelang-softmax, triton, tilelang or auto."""
    compare: str = "none"
    """Kernel to run the same tokens on, for parity, speed-up and memory; none: no comparison."""
    task: Literal["perplexity", "passkey"] = "perplexity"
    """Perplexity of a text, or retrieval of a number hidden in a long one."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    context_lengths: str | int | list[int] | None = None
    """Context lengths in tokens, "1024,4096"; what the model was trained with by default."""
    stride: int | None = None
    """Tokens from one window's start to the next; half of the context by default."""
    max_tokens: int | None = 262_144
    """Tokens of the text to evaluate, from its first document on; null: all."""
    batch_size: int | None = None
    """Windows at a time; by default as many as hold 16,384 tokens, at least one."""
    prefill_chunk: int | None = None
    """Read a window in pieces of so many tokens over a key/value cache; by default in one."""
    rope_scaling: RopeScaling | None = None
    """Stretch RoPE beyond the trained context: linear, ntk, yarn or llama3; as trained by
    default."""
    rope_factor: float | None = None
    """By how much; by default the longest context over the trained one."""
    paired_targets: int = 2048
    """Targets of the paired curve (the same tokens with context 256, 512, ...); 0: no curve."""
    probe_tokens: int = 16_384
    """Longest window in tokens that causality is probed on; 0: no probe."""
    oracle_tokens: int = 8192
    """Tokens read for --compare's truth, one precision up."""
    passkey: PasskeyConfig = field(default_factory=PasskeyConfig)
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Autocast dtype; float32 is no autocast. auto: bfloat16 on a GPU (float16 before compute
    capability 8.0), float32 on a CPU."""
    out_dir: str | None = None
    """Folder of eval.json and eval.png; by default eval/ in the run's folder."""
    overwrite: bool = False
    """Replace an eval.json and eval.png that are there."""
    plots: bool = True
    """Draw eval.png."""

    def lengths(self, trained: int) -> list[int]:
        """--context_lengths as numbers, in the order given. Raises ValueError for no number."""
        given = self.context_lengths
        if given is None:
            return [trained]
        if isinstance(given, str):
            given = [part.strip() for part in given.strip("[] ").split(",")]
        try:
            found = [int(part) for part in (given if isinstance(given, list) else [given])]
        except ValueError:
            found = []
        if not found:
            raise ValueError(
                f"--context_lengths {self.context_lengths} must be whole numbers with commas "
                "between them, as 1024,4096"
            )
        return found

    def stride_of(self, length: int) -> int:
        """--stride, or half of the context. Raises ValueError where that does not fit it."""
        stride = default_stride(length) if self.stride is None else self.stride
        check_stride(length, stride)
        return stride

    def validate(self) -> None:
        """Raises ValueError, naming the flag, for a setting out of range."""
        refuse_empty(
            {
                "--checkpoint": self.checkpoint,
                "--out_dir": self.out_dir,
                "--data.source": self.data.source,
                "--data.tokenizer": self.data.tokenizer,
                "--data.cache_dir": self.data.cache_dir,
            }
        )
        at_least_one = ("max_tokens", "batch_size", "prefill_chunk", "oracle_tokens")
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        for name in ("paired_targets", "probe_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must not be negative, got {getattr(self, name)}")
        if self.rope_factor is not None and self.rope_scaling in (None, "none"):
            raise ValueError("--rope_factor needs --rope_scaling linear, ntk, yarn or llama3")
        self.passkey.validate()
