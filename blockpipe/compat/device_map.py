"""A pipeline from a device map: Accelerate's and Transformers' table from modules to devices.

A model under a device map runs on one device after the other. Its map says already which modules
are together on a device, and that is all that stages need.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._common.callsite import remembers_caller, users_line, warn
from .._common.checks import did_you_mean, expected
from .._common.hints import knows_other_names
from .._common.modules import named_slots
from .._torch.modules import buffers_of, parameters_of
from ..devices.devices import check_device, is_asynchronous
from ..errors import PlanError, UsageError
from ..pipeline import Pipeline
from ..preparation.options import check_model
from ..stages.assignment import Assignment
from ..stages.marks import has_forward
from ..stages.plan import StagePlan

DeviceMap = Mapping[str, int | str | torch.device]


@remembers_caller
@knows_other_names(
    devices="they are those of the device map; pass device_map=…, or make a Pipeline",
    plan="it is made from the device map; pass device_map=…, or make a Pipeline",
)
def from_device_map(
    model: nn.Module, device_map: DeviceMap | None = None, **options: Any
) -> Pipeline:
    """Make a pipeline whose stages are the devices of a device map.

    Each device is a stage, numbered in the order in which the model defines its modules. While the
    pipeline has the model placed, Accelerate's hooks are off it; ``pipe.unplace()`` puts them back.
    A module without parameters (a rotary embedding, say) runs where the forward is when it calls
    it, wherever the map has it.

    Args:
        model: the model, as ``from_pretrained(…, device_map=…)`` or Accelerate's
            ``dispatch_model`` returns it. Its marks do not count.
        device_map: a mapping from modules' paths to devices, in the place of the model's own
            ``hf_device_map``. The longest path that fits a module counts, and ``""`` is the whole
            model. A module that no path fits stays on the stage that the forward is on.
        **options: options of :class:`Pipeline`, but for ``devices`` and ``plan``.

    Returns:
        A :class:`Pipeline`. Nothing is moved before its first call.

    Raises:
        PlanError: the map is none, or names what the model does not have.
        DeviceError: this machine does not have one of the devices.
        UsageError: the model has no map, or has weights that are offloaded to host memory or disk.

    Source: ``accelerate.dispatch_model``, of which this is the pipelined counterpart.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> pipe = bp.from_device_map(net, {"0": "cpu:0", "1": "cpu:1"}, chunks=2)
        >>> pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.mean).loss.shape
        torch.Size([])
    """
    check_model(model)
    prefix, given = "", device_map
    if given is None:
        prefix, given = _own_map(model)
    contract = "a mapping from modules' paths to devices"
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        fix = "pass 'auto' to from_pretrained, and its model here without a device_map"
        raise PlanError(expected(contract, given, for_="device_map", fix=fix))
    if not given:
        fix = "write {'layers.0': 'cuda:0', 'layers.1': 'cuda:1'}"
        raise PlanError(expected(contract, given, for_="device_map", fix=fix))
    placed = {_join(prefix, path): _checked(path, device) for path, device in given.items()}
    _check_paths(model, [path for path in placed if path])
    devices: list[torch.device] = []
    assignments = []
    for path, device in _module_devices(model, placed):
        if device not in devices:
            devices.append(device)
        assignments.append(Assignment(path, None, devices.index(device)))
    if len(devices) == 1:
        warn(
            f"the device map has all modules on {devices[0]}, which makes a pipeline of one stage; "
            "pass a device_map that has several devices, or Pipeline(model, plan=balance(…))"
        )
    plan = StagePlan(assignments, partial=True)
    return Pipeline(model, devices=devices or None, plan=plan, **options)


def _own_map(model: nn.Module) -> tuple[str, Any]:
    """The map that a model was loaded with, or a model inside of it (peft wraps one), and that
    one's path."""
    for path, module in model.named_modules():
        found = vars(module).get("hf_device_map")
        if found is not None:
            return path, found
    raise UsageError(
        f"expected a model with a device map, got {type(model).__name__} without hf_device_map "
        f"({users_line()}); load it with from_pretrained(…, device_map='auto') on a "
        "machine with accelerators, pass device_map={'layers.0': 'cuda:0', …}, or make a Pipeline "
        "with plan=balance(…)"
    )


def _join(prefix: str, path: str) -> str:
    return ".".join(part for part in (prefix, path) if part)


def _checked(path: str, device: Any) -> torch.device:
    """A device of this machine; on the CPU with the number of its lane."""
    if device == "disk":
        raise UsageError(
            f"expected a device for {path!r} of device_map, got 'disk' ({users_line()}): a stage's "
            "weights stay on its device; name devices alone, on more of them if need be"
        )
    found = check_device(device)
    return found if is_asynchronous(found) else torch.device(device)


def _check_paths(model: nn.Module, paths: list[str]) -> None:
    """A map may name parameters and buffers too: they live where they are read first."""
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for slots_of in (parameters_of, buffers_of):
        known |= {name for name, _ in named_slots(model, slots_of)}
    for path in paths:
        if path not in known:
            raise PlanError(
                f"device_map names {path!r}, which {type(model).__name__} does not have "
                f"({users_line()}); {did_you_mean(path, sorted(known - {''}))}"
            )


def _module_devices(
    model: nn.Module, placed: Mapping[str, torch.device]
) -> Iterator[tuple[str, torch.device]]:
    """Each module that is called and has parameters, and its device by the longest path that fits
    it."""
    for path, module in model.named_modules():
        if not path or not has_forward(module) or next(module.parameters(), None) is None:
            continue
        parts = path.split(".")
        around = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
        device = next((placed[name] for name in around if name in placed), None)
        if device is not None:
            yield path, device
