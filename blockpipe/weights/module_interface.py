"""What a pipeline is as a module: its model's state, and no moves.

The keys of a ``state_dict`` are the plain model's, so that checkpoints go both ways; what would
treat the stages as one module on one device (``.to(device)``, ``torch.compile``,
``DistributedDataParallel``) is refused at once.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.hints import REPLICATED, for_trainer, what_is_meant, where_model_has
from .._common.nested import map_tensors
from .._torch.modules import (
    CHILDREN,
    RefusesWrappers,
    Wrapper,
    backward_pre_hooks_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    full_backward_hooks_of,
    versions_in,
)
from .._torch.tensors import arguments_of_to
from ..devices.devices import is_on_meta, is_same_device
from ..errors import UsageError
from ..recording.recording import Recording
from .accelerate_hooks import PREPARED
from .materialize import PendingValues, load_in_place
from .save import save_weights
from .sources import Weights
from .validation import load_checked, stages_of, to_be_loaded

P = ParamSpec("P")
R = TypeVar("R")

_HOOKS = {
    "forward pre-hooks": forward_pre_hooks_of,
    "forward hooks": forward_hooks_of,
    "backward pre-hooks": backward_pre_hooks_of,
    "backward hooks": full_backward_hooks_of,
}

_NOT_IN: dict[Wrapper, str] = {
    "torch.compile": (
        "torch.compile around a pipeline cannot see its stages; pipe.compile() compiles the "
        "modules inside the stages ({where})"
    ),
    "DistributedDataParallel": (
        "DistributedDataParallel around a pipeline would reduce gradients once for each "
        f"micro-batch ({{where}}); {REPLICATED}"
    ),
    "DataParallel": (
        "DataParallel around a pipeline would copy it to each device at each call, but its "
        "stages have devices of their own ({where}); take it off, and for copies on other devices "
        "use blockpipe.replicas.Replicas(model, [['cuda:0', 'cuda:1'], ['cuda:2', 'cuda:3']])"
    ),
    "FullyShardedDataParallel": (
        "FullyShardedDataParallel around a pipeline would gather all stages on one device "
        f"({{where}}); leave it out, and {REPLICATED}"
    ),
    "fully_shard": (
        "fully_shard, or replicate, of a pipeline would treat its stages as one module on one "
        f"device ({{where}}); leave it out, and {REPLICATED}"
    ),
    "torch.jit.script": (
        "torch.jit.script cannot see the stages of a pipeline ({where}); call unplace(), and give "
        "it pipe.module"
    ),
    "peft": (
        "peft around a pipeline would save no adapters, because its names of modules are not those "
        "of the state dict ({where}); put the pipeline around: model = "
        "get_peft_model(pipe.unplace(), config); pipe = blockpipe.Pipeline(model, devices=…)"
    ),
}


class _BoundForward(functools.partial[Any]):
    """A pipeline's forward, with the signature of its model's for those who look at it (Trainer
    drops the columns of a data set that are not in it)."""

    __name__ = "forward"

    @property
    def __self__(self) -> nn.Module:
        return cast(nn.Module, self.args[0])

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(cast(Any, self.__self__.module).forward)


class _Forward:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, pipe: nn.Module | None, owner: type) -> Callable[..., Any]:
        return self._method if pipe is None else _BoundForward(self._method, pipe)


def with_models_signature(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a pipeline's forward: an instance's has the signature of the model's."""
    return cast("Callable[P, R]", _Forward(method))


class ModuleInterface(RefusesWrappers):
    """A module that holds the user's model as ``module``, and stands for it."""

    module: nn.Module
    _values: PendingValues

    @property
    def recording(self) -> Recording | None:
        """The recording of the latest call; ``None`` if nothing is known of the stages."""
        return None

    @property
    def _stage_devices(self) -> list[torch.device]:
        """The devices that stages are on, or will be."""
        raise NotImplementedError

    def _refuse_wrapper(self, wrapper: Wrapper) -> NoReturn:
        """Raise an error for a wrapper that would treat the stages as one module; it says why that
        fails, and what to do instead."""
        raise UsageError(_NOT_IN[wrapper].format(where=users_line()))

    def _check_forward(self, *, is_scaled: bool) -> None:
        """Raise :class:`UsageError` if a loop around the pipeline has put something around its
        ``forward`` or ``backward``, or hooks on it: a step goes through none of them.

        Args:
            is_scaled: whether the gradients of the step are scaled as the loop has it.
        """
        if "forward" in self.__dict__:
            raise UsageError(
                "expected the pipeline's own forward, got one that was put in its place, which "
                f"forward_backward does not go through ({users_line()}); put it around "
                "pipe.module.forward, which each micro-batch calls; with Accelerate, use "
                "blockpipe.integrations.accelerate.PipelineAccelerator, which does that"
            )
        hooked = [what for what, hooks_of in _HOOKS.items() if hooks_of(self)]
        if hooked:
            raise UsageError(
                f"expected a pipeline without hooks of its own, got one with {' and '.join(hooked)}"
                f", which forward_backward does not call ({users_line()}); register them on "
                "pipe.module, where each micro-batch calls them, or call pipe(x) and backward()"
            )
        if PREPARED in self.__dict__ and not is_scaled:
            raise UsageError(
                "expected accelerator.forward_backward(pipe, …) for a pipeline that Accelerate has "
                f"prepared, got a call of the pipeline's own forward_backward ({users_line()}), "
                "whose gradients are not divided by gradient_accumulation_steps, nor scaled for "
                "float16; make the accelerator by "
                "blockpipe.integrations.accelerate.PipelineAccelerator(…), which has that method, "
                "or call accelerator.backward(loss) with a loss of pipe(x)"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            hint = for_trainer(sys._getframe(1).f_globals.get("__name__", ""))
            hint = hint or where_model_has(self.__dict__.get(CHILDREN, {}).get("module"), name)
            hint = hint or what_is_meant(name, dir(type(self)))
            if hint is None:
                raise
            raise AttributeError(f"{error}; {hint}", name=name, obj=self) from None

    def __getitem__(self, key: Any) -> NoReturn:
        raise UsageError(
            f"a pipeline has no items, as its model may ({users_line()}); write "
            f"pipe.module[{key!r}], or pipe.parameters() for an optimizer"
        )

    def __len__(self) -> int:
        raise UsageError(
            f"a pipeline has no length, as its model may ({users_line()}); write "
            "len(pipe.module), or len(pipe.devices) for the number of stages"
        )

    def __bool__(self) -> bool:  # or else __len__ would say it
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `to`, `to_empty`, `cuda` and a module around the pipeline end in.
        for device in dict.fromkeys(self._stage_devices):
            moved = fn(torch.empty(0, device=device)).device
            if not is_same_device(moved, device):
                self._check_device(moved)
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _check_device(self, device: torch.device) -> None:
        """Raise :class:`UsageError` for a device that is not the one of all stages."""
        devices = sorted(set(map(str, self._stage_devices)))
        if all(is_same_device(device, own) for own in self._stage_devices):
            return
        raise UsageError(
            f"expected no device to move a pipeline to, got {str(device)!r} ({users_line()}): its "
            f"stages are on {', '.join(devices)}, and inputs are moved there; leave the call out, "
            "pass devices=[…] to Pipeline, or call unplace() and move the model (see 'Devices' in "
            "docs/how-to/training-loops.md)"
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype (``pipe.to(torch.bfloat16)``); devices stay as they are.

        Raises:
            UsageError: a device other than the one that all stages are on.
        """
        device, dtype, memory_format = arguments_of_to(*args, **kwargs)
        if device is not None:
            self._check_device(device)
        changes: dict[str, Any] = {"dtype": dtype, "memory_format": memory_format}
        changes = {name: value for name, value in changes.items() if value is not None}
        return super().to(**changes) if changes else self

    def cuda(self, device: Any = None) -> Self:
        """Change the device as :meth:`to` does."""
        return self.to(torch.device("cuda" if device is None else device))

    def cpu(self) -> Self:
        """Change the device as :meth:`to` does."""
        return self.to(torch.device("cpu"))

    # --- values, in and out

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain model's state dict, with its keys; the tensors are on their stages'
        devices."""
        found = self.module.state_dict(*args, **kwargs)
        prefix, versions = kwargs.get("prefix", ""), versions_in(found)
        if prefix:  # a module around the pipeline asks for them by the names of its own children
            for name in [name for name in versions if f"{name}.".startswith(prefix)]:
                inner = f"{prefix}module{name[len(prefix) - 1 :]}"
                versions.setdefault(inner, versions[name])
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict as the plain model does, after a check that finds everything that does
        not fit.

        A model that is still on the meta device keeps the dictionary's tensors until it is placed:
        do not write to them before. What the dictionary lacks, ``init=`` must fill then.

        Args:
            state_dict: from a pipeline of any stages, or from the plain model. A tied tensor may
                come under one of its names alone.
            strict: whether missing and unexpected names are errors; wrong shapes always are.
            assign: refused.

        Returns:
            What torch returns: the missing and the unexpected keys.

        Raises:
            WeightsError: every name and shape that does not fit, with its stage.
            UsageError: ``assign=True``.
        """
        if assign:
            raise UsageError(
                "a pipeline's parameters stay the same objects on their stages' devices, but "
                "assign=True would put the dictionary's tensors in their place; leave it out, or "
                f"load into pipe.module before the first call ({users_line()})"
            )
        if not isinstance(state_dict, Mapping):
            raise UsageError(
                expected(
                    "a mapping from names to values",
                    state_dict,
                    for_="state_dict",
                    fix="for a file call load_weights(path)",
                )
            )
        if is_on_meta(self.module):
            given, keys = to_be_loaded(self.module, state_dict, strict=strict)
            self._values.keep(given)
            return keys
        keys = load_checked(self.module, state_dict, strict=strict, recording=self.recording)
        self._values.forget_weights()
        return keys

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A module around the pipeline loads: torch goes through its children and asks for the keys
        # of "module", which `state_dict` leaves out.
        own = [name for name in state_dict if name.startswith(prefix)]
        values = {name.removeprefix(prefix): state_dict.pop(name) for name in own}
        if not is_on_meta(self.module):
            self._values.forget_weights()
        elif values:  # the children have no place for them, and say only what is missing
            self._values.keep(to_be_loaded(self.module, values, strict=False)[0])
            values = map_tensors(lambda tensor: tensor.to("meta"), values)
        state_dict.update((f"{prefix}module.{name}", value) for name, value in values.items())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_weights(self, weights: Weights) -> None:
        """Load a checkpoint, checked first, tensor by tensor, to where the model's tensors are.

        A model that is still on the meta device is loaded when it is placed.

        Args:
            weights: as for :class:`Pipeline`: a path, or a mapping from names to tensors.

        Raises:
            WeightsError: it cannot be read, or does not fit (then nothing has changed).

        Example:
            >>> import tempfile, torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
            >>> pipe = bp.Pipeline(bp.begin_blocks(net, {"1": 1}), devices=["cpu"] * 2, chunks=2)
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     pipe.save_weights(directory)
            ...     pipe.load_weights(directory)
        """
        if is_on_meta(self.module):
            self._values.keep(weights)
        else:
            load_in_place(self.module, weights, self.recording)
            self._values.forget_weights()

    def save_weights(
        self, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 1000**3
    ) -> None:
        """Save the weights as safetensors, as ``from_pretrained`` and ``load_weights`` read them.

        One file, or shards with an index; tied tensors once; at most one tensor at a time in host
        memory. What the directory held under these names is replaced at the end.

        Args:
            directory: where to; made if it is not there.
            max_shard_bytes: of one file, unless a single tensor is larger.

        Raises:
            WeightsError: tensors without values, or what safetensors cannot hold.

        Source: the layout is that of Hugging Face's ``save_pretrained``.
        """
        save_weights(self.module, directory, stages_of(self.recording), max_shard_bytes)
