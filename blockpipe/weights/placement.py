"""Parameters and buffers to their stage's device, and back.

In place: the same ``Parameter`` objects get other data, so an optimizer made before goes on
working. ``Module.to`` on submodules was no alternative: a stage is no submodule, and a parameter
tied across stages has one home.
"""

import operator
import weakref
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._common.code import code_of
from .._common.libraries import is_users
from .._common.modules import OwnHook, StandIn, named_slots
from .._torch.checkpoints import wait_for_all_devices
from .._torch.graph import gradient_hooks, stepping_hooks
from .._torch.modules import (
    COMPILED_CALL,
    backward_pre_hooks_of,
    buffers_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    full_backward_hooks_of,
    hooks_of_all_modules,
    parameters_of,
)
from ..devices.devices import is_asynchronous
from ..devices.gathered import move_data
from ..errors import PlanError, UsageError
from ..recording.plan_resolution import attached_plan
from ..recording.recording import Recording
from ..stages.marks import MARK
from .shared_places import SharedPlaces

_HOOKS = forward_pre_hooks_of, forward_hooks_of, backward_pre_hooks_of, full_backward_hooks_of


class Placement:
    """The devices of a model's tensors, now and before.

    Args:
        model: whose parameters and buffers.
        devices: one for each stage.
    """

    def __init__(self, model: nn.Module, devices: list[torch.device]) -> None:
        self.model = model
        self.devices = devices
        self._origins: dict[int, tuple[Tensor, torch.device]] = {}
        self._there: dict[int, tuple[Tensor, torch.device]] = {}  # where it was moved to
        # The origins of those that were taken out of the model. torch.utils.swap_tensors refuses
        # tensors with weak references, so those in the model have none.
        self._taken_out: list[tuple[weakref.ref[Tensor], torch.device]] = []
        if len({device for device in map(torch.device, devices) if is_asynchronous(device)}) > 1:
            wait_for_all_devices()

    def place(self, recording: Recording) -> dict[int, tuple[Tensor, int, int, str, bool]]:
        """Move the tensors that are not where the recording wants them.

        Args:
            recording: says which stage each parameter and buffer lives on. What it does not read
                stays where an earlier one had it.

        Returns:
            From ``id`` to (tensor, first hop, stage, name, whether the forward writes to it), for
            all that some call reads.
        """
        named = dict(named_slots(self.model, parameters_of))
        named |= dict(named_slots(self.model, buffers_of))
        on_meta = [name for name, t in named.items() if t.device.type == "meta"]
        if on_meta:
            raise PlanError(
                f"a pipeline needs values, but {on_meta[:3]} of {type(self.model).__name__} are on "
                "the meta device; pass weights=… (a checkpoint) or init=… to Pipeline, or call "
                "blockpipe.materialize (record() and summaries work on the meta device)"
            )
        computed = [name for name, t in named.items() if t.grad_fn is not None]
        if computed:
            raise UsageError(
                f"a pipeline's parameters are leaves, but {computed[:3]} are computed from others "
                "(functional_call, or an entry of _parameters that the forward sets?): each "
                "micro-batch's backward would run through that; use parametrizations, which "
                "compute them in the forward, or delete the parameter once (del m.weight) and set "
                "a plain attribute in the forward (m.weight = f(m.weight_raw))"
            )
        self._follow({id(tensor) for tensor in named.values()})
        homes: dict[int, tuple[Tensor, int, int, str, bool]] = {}
        for held in (*recording.parameters, *recording.buffers):
            tensor = named[held.name]
            if held.hop is not None or id(tensor) not in self._origins:
                self._move(tensor, self.devices[held.stage])
            if held.hop is not None:
                homes[id(tensor)] = tensor, held.hop, held.stage, held.name, held.written
        return homes

    def _follow(self, present: set[int]) -> None:
        """Hold no tensor that was taken out of the model, but remember where it came from."""
        taken_out = [(ref(), device) for ref, device in self._taken_out]
        alive = [(tensor, device) for tensor, device in taken_out if tensor is not None]
        back = {id(tensor): (tensor, device) for tensor, device in alive if id(tensor) in present}
        before = [*self._origins.values(), *alive]
        self._taken_out = [(weakref.ref(t), device) for t, device in before if id(t) not in present]
        self._origins = {key: o for key, o in self._origins.items() if key in present} | back
        self._there = {key: there for key, there in self._there.items() if key in present}

    def is_disturbed(self) -> bool:
        """Return whether somebody has moved since what was placed."""
        return any(tensor.device != there for tensor, there in self._there.values())

    def holds(self) -> bool:
        """Return whether nobody has moved since what was placed, and no parameter is new."""
        is_whole = all(id(parameter) in self._there for parameter in self.model.parameters())
        return is_whole and not self.is_disturbed()

    def unplace(self) -> None:
        """Move everything back to where it came from."""
        self._follow(set())
        for ref, device in self._taken_out:
            if (tensor := ref()) is not None:
                _to(tensor, device)
        self._taken_out.clear()
        self._there.clear()

    def _move(self, tensor: Tensor, device: torch.device) -> None:
        self._there[id(tensor)] = tensor, device
        self._origins.setdefault(id(tensor), (tensor, tensor.device))
        if tensor.device != device:
            follow_with_optimizer_state()
            _to(tensor, device)


def _to(tensor: Tensor, device: torch.device) -> None:
    # A first call may be an evaluation: what it moves is trained later.
    move_data(tensor, device)
    if tensor.grad is not None:
        move_data(tensor.grad, device)


_following: list[object] = []


def follow_with_optimizer_state() -> None:
    """From now on: state that an optimizer loaded before goes where its parameter is."""
    if not _following:
        _following.append(register_optimizer_step_pre_hook(_move_optimizer_state))


def _move_optimizer_state(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_meta and not parameter.is_meta:
                raise UsageError(
                    f"an optimizer's state has values, but {key!r} of {type(optimizer).__name__} "
                    f"for a parameter of shape {list(parameter.shape)} is on the meta device: it "
                    "was made or loaded before the model had values, and is lost; make and load "
                    "the optimizer after the placement (pass sample= to Pipeline)"
                )
            # 0-d `step` counters stay on the CPU by torch's own choice.
            if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                state[key] = value.to(parameter.device)


class Fingerprint:
    """The facts about a model that a recording depends on, cheap to compare before each step.

    Its modules with their code, marks and parameters are compared; the *modes* are part of what a
    recording is known by: switches, which a forward may ask for where it turns.

    Args:
        model: the user's.
        unread: names of attributes that no forward asks for.
    """

    def __init__(self, model: nn.Module, unread: Container[str] = ()) -> None:
        # What is in a scripted module is TorchScript's, and is asked for anew each time.
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._modules = modules
        slots = [*map(children_of, modules)]
        self._children = [(names, list(names.values())) for names in slots if names]
        self._childless = [names for names in slots if not names]
        self._held = [
            (names, key, tensor, tensor.device)
            for m in modules
            for names in (parameters_of(m),)
            for key, tensor in names.items()
            if tensor is not None
        ]
        self._tensors = [tensor for _, _, tensor, _ in self._held]
        self._shaped = [tensor for tensor in self._tensors if not is_lazy(tensor)]
        self._shapes = _shapes_of(self._shaped)
        # The user's modules may make buffers in their forwards.
        others = [m for m in modules if not is_users(type(m).__module__)]
        held = [*map(parameters_of, modules), *map(buffers_of, others)]
        self._counts = [(names, len(names)) for names in held]
        hooks = (hooks_of(m) for m in modules for hooks_of in _HOOKS)
        self._hooks = [*hooks, *hooks_of_all_modules()]
        self._shared_places = SharedPlaces(modules)
        self._plans = [attached_plan(module) for module in modules]
        self._code = [_code_of(module) for module in modules]
        self._classes = [(kind, kind.forward) for kind in {type(module) for module in modules}]
        self._switches = [
            (vars(module), name, module)
            for path, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, value in vars(module).items()
            if (isinstance(value, bool | str) or _is_rate(name, value))
            and f"{path}.{name}" not in unread
        ]
        self._values: list[Any] = []
        self._modes: tuple[Any, ...] = ()

    def fits(self) -> bool:
        """Return whether the model's modules, with their code and marks, are what they were, and
        its parameters are what and where they were."""
        if any(kind.forward is not forward for kind, forward in self._classes):
            return False
        for module, own, kind, forward, compiled, mark in self._code:
            if type(module) is not kind or own.get(MARK) is not mark:
                return False
            found = own.get("forward")
            if found is not forward and not isinstance(found, StandIn):  # of a step under way
                return False
            found = own.get(COMPILED_CALL)
            if found is not compiled and not isinstance(found, StandIn):
                return False
        for now, then in self._children:
            if list(now.values()) != then:
                return False
        if any(self._childless):
            return False
        for names, key, tensor, device in self._held:
            if names.get(key) is not tensor or tensor.device != device:
                return False
        if _shapes_of(self._shaped) != self._shapes:  # tensor.data = …
            return False
        return [len(names) for names, _ in self._counts] == [count for _, count in self._counts]

    def is_replanned(self) -> bool:
        """Return whether a plan was set or taken off since, on any of the modules."""
        return any(map(operator.is_not, map(attached_plan, self._modules), self._plans))

    def modes(self) -> tuple[Any, ...]:
        """Return the attributes of modules that are switches (``training`` among them), and whether
        a rate of dropout is above zero."""
        values = [own.get(name) for own, name, _ in self._switches]
        if not self._modes or not all(map(operator.is_, values, self._values)):
            self._values, self._modes = values, tuple(map(_switch, values))
        return self._modes

    def turned(self) -> list[tuple[nn.Module, str, Any]]:
        """Return the switches that have been set since :meth:`modes` was called last, each with
        what it was."""
        values = [own.get(name) for own, name, _ in self._switches]
        if all(map(operator.is_, values, self._values)):
            return []
        pairs = zip(values, self._values, self._switches, strict=True)
        return [(module, name, then) for now, then, (_, name, module) in pairs if now is not then]

    def asked(self) -> tuple[Any, ...]:
        """Return what else may decide a forward's way, or share values with one: which hooks each
        module has, and all have, and each parameter has; which places hold one object; which
        parameters need a gradient; and some of torch's settings."""
        hooks = [_codes_of(hooks) if hooks else () for hooks in self._hooks]
        leaves = [
            (index, _codes_of(hooks))
            for index, tensor in enumerate(self._tensors)
            for hooks in (gradient_hooks(tensor), stepping_hooks(tensor))
            if hooks
        ]
        torchs = (
            *(torch.get_num_threads(), torch.get_default_dtype()),
            *(torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()),
            torch.are_deterministic_algorithms_enabled(),
        )
        trained = [tensor.requires_grad for tensor in self._tensors]
        return (*torchs, *hooks, *leaves, *self._shared_places.pattern(), *trained)


def _shapes_of(tensors: list[Tensor]) -> tuple[list[torch.Size], list[torch.dtype]]:
    """Return what ``tensor.data = …`` may change."""
    shapes, dtypes = operator.attrgetter("shape"), operator.attrgetter("dtype")
    return [*map(shapes, tensors)], [*map(dtypes, tensors)]


def _codes_of(hooks: Mapping[int, Any]) -> tuple[Any, ...]:
    """Return what runs in the user's hooks; one that is registered anew for each step is the
    same."""
    users = (hook for hook in hooks.values() if not isinstance(hook, OwnHook))
    return tuple(code_of(hook) for hook in users)


def _code_of(module: nn.Module) -> tuple[nn.Module, dict[str, Any], type, Any, Any, Any]:
    """Return a module, its attributes, and what decides which code runs where it is called."""
    own = vars(module)
    return module, own, type(module), own.get("forward"), own.get(COMPILED_CALL), own.get(MARK)


def _is_rate(name: str, value: object) -> bool:
    """Return whether a module's attribute is a rate of dropout, which draws nothing at 0."""
    return isinstance(value, float) and (name == "p" or "drop" in name)


def _switch(value: object) -> object:
    if isinstance(value, bool | str):
        return value
    return value > 0 if isinstance(value, float) else type(value)
