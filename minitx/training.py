"""train.py's work: everything is checked first, then one run is made in its folder."""

from dataclasses import replace

import torch

from minitx import metrics
from minitx.batches import check_sizes
from minitx.cli import EXIT_OUT_OF_MEMORY, EXIT_PARITY_FAILED, RunStopped
from minitx.config import TrainConfig
from minitx.data import load_data
from minitx.determinism import check_deterministic, deterministic
from minitx.kernel_flags import check_kernels
from minitx.replay import replay
from minitx.resume import choose_out_dir, clear_out_dir, find_resume, newest_checkpoint, run_of
from minitx.run import Run
from minitx.run_lock import only_run_in
from minitx.signals import Stopped, StopRequest
from minitx.trainer import model_config, resolve_device, resolve_dtype


def train(config: TrainConfig) -> int:
    """Runs what the config says; returns the exit code: 0, or 3 where parity failed.

    Raises ValueError and KernelUnavailableError, before anything is written, for what cannot run,
    and RunStopped, with an exit code, where a run that was under way cannot go on.
    """
    config.validate()
    with StopRequest() as stop, deterministic(config.deterministic):
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        config = resolve(config, device, dtype)
        try:
            if config.debug.replay is not None:
                return replay(config, device, dtype)
            return start_run(config, device, dtype, stop)
        except Stopped:
            again = " and --overwrite" if config.out_dir and not config.overwrite else ""
            again = "" if config.resume or config.debug.replay else again
            print(f"stopped before a step was made, nothing to save; give the same command{again}")
            return 0
        except RuntimeError as error:
            if not metrics.is_out_of_memory(error):
                raise
            raise RunStopped(
                f"out of memory on {device} ({str(error).splitlines()[0]}); try a smaller "
                f"--batch.micro (now {config.micro_batch}), --recompute full, a shorter "
                "--batch.seq_len or a fused --kernel",
                EXIT_OUT_OF_MEMORY,
            ) from error


def resolve(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> TrainConfig:
    """The config with what depends on the machine, or on other settings, filled in."""
    batch = replace(config.batch, seq_len=config.seq_len, micro=config.micro_batch)
    name = str(dtype).removeprefix("torch.")
    return replace(config, device=str(device), dtype=name, batch=batch)


def start_run(
    config: TrainConfig, device: torch.device, dtype: torch.dtype, stop: StopRequest
) -> int:
    flags = check_kernels(config.kernel, config.compare, config.model, device, dtype)
    if config.deterministic:
        for flag, kernel in flags.items():
            check_deterministic(flag, kernel, config.model, device, dtype)
    if config.log.tensorboard:
        metrics.require_tensorboard()
    checkpoint = find_resume(config)
    data = load_data(config.data)
    check_sizes(data.train, config.micro_batch, config.seq_len)
    model = model_config(config, data)
    out_dir = run_of(checkpoint) if checkpoint is not None else choose_out_dir(config)
    assert out_dir is not None  # find_resume has seen to it
    run = Run(config, model, data, out_dir, device, dtype)
    with only_run_in(out_dir):
        # Who held it while the data was loaded may have saved only then, as a job that makes way.
        if newest_checkpoint(config) != checkpoint:
            raise ValueError(
                f"another process has saved in {out_dir} meanwhile; give the same command again"
            )
        if checkpoint is None:
            clear_out_dir(out_dir, config)
        run.describe()
        if checkpoint is not None:
            run.resume(checkpoint)
        else:
            run.record_start(0)
            if config.compare != "none" and not run.prove_parity():
                return EXIT_PARITY_FAILED
            run.start()
        return run.train(stop)
