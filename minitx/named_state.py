"""Models and optimizers as named tensors, whatever they are wrapped in.

The optimizer's state goes by the names of parameters, not by their place in a list: another order
of parameters cannot give one parameter another's moments.
"""

from typing import Any

import torch
from torch import nn

# What torch.compile, DistributedDataParallel, FSDP and activation checkpointing put into names.
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# How an optimizer runs, not what it computes: a resumed run keeps its own.
RUN_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}


def unwrap(model: nn.Module) -> Any:
    """The model inside torch.compile's and DistributedDataParallel's wrappers."""
    while inner := [child for name, child in model.named_children() if name in WRAPPERS]:
        model = inner[0]
    return model


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers; one that is tied stands once, by its first name."""
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[_clean(name)] = tensor
    return named


def parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each parameter group's parameters."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    try:
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise ValueError("the optimizer holds a parameter that is not the model's") from None


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Its tensors by "PARAMETER.exp_avg", and what JSON holds: other values and the groups."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, names in zip(optimizer.param_groups, parameter_names(optimizer, model), strict=True):
        settings = {k: v for k, v in group.items() if k != "params" and k not in RUN_OPTIONS}
        for key, value in settings.items():
            if isinstance(value, torch.Tensor):  # a learning rate that a compiled step reads
                settings[key] = value.item()
        groups.append(settings | {"params": names})
        for name, parameter in zip(names, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                kind = tensors if isinstance(value, torch.Tensor) else values
                kind[f"{name}.{key}"] = value
    return tensors, {"groups": groups, "values": values}


def fill_optimizer(optimizer: torch.optim.Optimizer, stored: dict[str, Any], tensors: Any) -> None:
    """Sets what optimizer_state() gave; tensors is the opened file that holds the tensors."""
    places: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}
    for group, saved in zip(optimizer.param_groups, stored["groups"], strict=True):
        places |= {n: (p, group) for n, p in zip(saved["params"], group["params"], strict=True)}
        for key, value in saved.items():
            now = group.get(key)
            if key == "params":
                continue
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
    optimizer.state.clear()
    for name, value in stored["values"].items():
        parameter, _ = places[name.rpartition(".")[0]]
        optimizer.state[parameter][name.rpartition(".")[2]] = value
    for name in list(tensors.keys()):
        parameter, group = places[name.rpartition(".")[0]]
        key = name.rpartition(".")[2]
        # torch's own rule: the step is counted on the GPU only if the update reads it there.
        on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
        device = torch.device("cpu") if on_cpu else parameter.device
        optimizer.state[parameter][key] = tensors.get_tensor(name).to(device, copy=True)
