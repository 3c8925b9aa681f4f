"""A model on the meta device gets memory and values, stage by stage, tensor by tensor.

The obvious way, ``to_empty`` and then ``load_state_dict``, needs the model and the checkpoint as a
whole on one device; here a tensor is allocated where its stage is and filled before the next.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._common.callsite import users_line, warn
from .._common.checks import expected, is_integer
from .._common.modules import named_slots
from .._torch.modules import buffers_of, parameters_of
from .._torch.tensors import memory_of
from ..devices.devices import checked_devices, is_on_meta
from ..errors import UsageError
from ..recording.entries import TensorInfo
from ..recording.recording import Recording
from .filling import Materializer
from .placement import follow_with_optimizer_state
from .sources import Source, Weights, open_weights
from .validation import compare_state_dict, slots_of

_log = logging.getLogger(__name__)

Init = Callable[[nn.Module], object] | str

_SLOTS = (parameters_of, buffers_of)

REMEDY = "pass weights=… (a checkpoint), init=… (a function of a module, or 'reset_parameters')"


def materialize(
    model: nn.Module,
    recording: Recording,
    devices: Sequence[Any],
    *,
    weights: Weights | None = None,
    init: Init | None = None,
    stages: Collection[int] | None = None,
) -> None:
    """Give the tensors of a model memory on their stages' devices, and values.

    :class:`Pipeline` does this itself for a model on the meta device; call it where a process
    loads its own stages only. Tensors that have values already stay where they are and are
    loaded in place. Peak memory is the stages' own and one tensor more.

    Args:
        model: built under ``torch.device("meta")``, as a whole or in part.
        recording: of this model; says which stage each tensor lives on.
        devices: one for each stage.
        weights: a path (a ``.safetensors`` file; the directory or the ``*.index.json`` of a
            sharded checkpoint; else a file for ``torch.load``), or a mapping from names to
            tensors. Values are cast to the model's dtype, floating ones to floating ones. One
            name of a tied tensor is enough. Extra state goes through ``set_extra_state``.
        init: called, as ``Module.apply`` does it, with each module that holds, itself or in its
            children, tensors for which ``weights`` has no values, children first, without
            gradients; or ``"reset_parameters"``: the own methods of the modules that hold such
            tensors themselves. What ``weights`` has given stays. A warning names the parameters
            and persistent buffers that ``weights`` lacks.
        stages: only the tensors that these stages read; ``None``: all.

    Raises:
        WeightsError: names or shapes do not fit (every misfit is named, and nothing has changed),
            or tensors are left without values (then the model is on the meta device again).
        UsageError: an argument that cannot be.

    Source: FSDP's ``param_init_fn`` for ``init``; the layout of sharded checkpoints is Hugging
    Face's.

    Example:
        >>> import torch, blockpipe as bp
        >>> with torch.device("meta"):
        ...     net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> net = bp.begin_blocks(net, {"1": 1})
        >>> recording = bp.record(net, torch.zeros(1, 4))
        >>> bp.materialize(net, recording, ["cpu"] * 2, init="reset_parameters", stages=[1])
        >>> [p.device.type for p in net.parameters()]
        ['meta', 'meta', 'cpu', 'cpu']
    """
    held = {name: h for h in (*recording.parameters, *recording.buffers) for name in h.names}
    differing = {name for slots in _SLOTS for name, _ in named_slots(model, slots)}
    differing ^= held.keys()
    if differing:
        raise UsageError(
            f"expected a recording of this {type(model).__name__}, got one that differs in "
            f"{sorted(differing)[:3]} ({users_line()}); record the model anew"
        )
    checked = checked_devices(devices) or []
    recording.check(len(checked))
    check_init(model, weights, init)
    if weights is None and init is None:
        raise UsageError(f"expected weights= or init=, got neither ({users_line()}); {REMEDY}")
    wanted = _checked_stages(stages, recording.num_stages)
    source = None if weights is None else open_weights(weights)
    if source is not None:
        check_weights(model, source, held, init)
    _tell_shared_memory(model)
    filling = Materializer(model, source, [checked[n] for n in range(recording.num_stages)])
    with filling.or_nothing(), torch.inference_mode(False), torch.no_grad():
        unique = {id(h): h for h in held.values()}.values()
        for entry in sorted(unique, key=lambda h: h.stage):
            filling.fill(entry, wanted)
        if init is not None:
            filling.initialize(_as_function(init), recurse=not isinstance(init, str))
        filling.check(whole=stages is None)
        _log.info(
            "filled %s from %s, stages %s",
            type(model).__name__,
            " and ".join(["weights"] * (source is not None) + ["init"] * (init is not None)),
            sorted(wanted),
        )
        if source is not None:
            _set_extra_state(model, source)
    follow_with_optimizer_state()  # what an optimizer loaded on meta is lost, and no step says so


def _tell_shared_memory(model: nn.Module) -> None:
    """Warn of different tensors in one memory: each gets its own, as by torch's ``to_empty``."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (pair for slots in _SLOTS for pair in named_slots(model, slots)):
        if tensor.is_meta:
            first, other = found.setdefault(memory_of(tensor), (name, tensor))
            if other is not tensor:
                warn(
                    f"{first!r} and {name!r} have one memory on the meta device, and get one each: "
                    "what is written to one is not seen in the other, as it is in a model that is "
                    f"built with values ({users_line()}); use one parameter or buffer for both"
                )


def _checked_stages(stages: object, count: int) -> Collection[int]:
    """Return the stages that are asked for; ``None`` is all of them."""
    if stages is None:
        return range(count)
    if not isinstance(stages, Collection) or isinstance(stages, str):
        raise UsageError(expected(f"a list of some of 0..{count - 1}", stages, for_="stages"))
    for stage in stages:
        if not is_integer(stage, 0) or stage >= count:
            contract = f"an integer from 0 to {count - 1}, as the recording has stages,"
            raise UsageError(expected(contract, stage, for_="stages"))
    return stages


def load_in_place(model: nn.Module, weights: Weights, recording: Recording | None) -> None:
    """Load a checkpoint into a model that has values, each tensor to where it is.

    Raises:
        WeightsError: it cannot be read, or does not fit (then nothing has changed).
        OSError: reading failed on the way: a part has been loaded.
    """
    source = open_weights(weights)
    parts = () if recording is None else (*recording.parameters, *recording.buffers)
    check_weights(model, source, {name: h for h in parts for name in h.names})
    try:
        with torch.no_grad():
            for slot, tensor in slots_of(model).values():
                name = slot.source_name(source.headers)
                if name is not None:
                    source.read(name, tensor)
            _set_extra_state(model, source)
        _log.info("loaded %d tensors into %s", len(source.headers), type(model).__name__)
    except BaseException as error:  # a disk that fails
        error.add_note("blockpipe: the model now holds a part of the checkpoint")
        raise


def check_init(model: nn.Module, weights: object, init: object) -> None:
    """Raise :class:`UsageError` for a value that is no ``init=``, or has nothing to do."""
    if init is None:
        return
    if not callable(init) and init != "reset_parameters":
        fix = "a function is called with each module"
        raise UsageError(expected("a function or 'reset_parameters'", init, for_="init", fix=fix))
    if weights is None and not is_on_meta(model):
        raise UsageError(
            f"init= gives values to a model on the meta device, but every tensor of "
            f"{type(model).__name__} has some already; build it under torch.device('meta'), or "
            "initialize it before"
        )


def check_weights(
    model: nn.Module, source: Source, held: Mapping[str, TensorInfo], init: object = None
) -> None:
    """Raise one :class:`WeightsError` for everything in which a checkpoint does not fit.

    Args:
        model: to be filled.
        source: the checkpoint.
        held: from names to what a recording knows of them; may be empty.
        init: gives values to what the checkpoint lacks, if there is one.
    """
    slots = slots_of(model).values()
    for slot, tensor in slots:
        slot.stage = next((held[name].stage for name in slot.names if name in held), None)
        # A function is called for what is on meta only: what has values may well not be the
        # checkpoint's.
        slot.required = (tensor.is_meta and init is None) or (slot.saved and not tensor.is_meta)
    remedy = (
        "rename what is named otherwise (weights= takes a mapping too), and pass init= for what "
        "no checkpoint holds"
    )
    found = compare_state_dict([slot for slot, _ in slots], source.headers)
    known = _extra_state_of(model)
    found.unexpected += [
        f"{name!r}, for which no module has a set_extra_state"
        for name in source.extra
        if name not in known
    ]
    found.check(source.what, model, remedy)


def _set_extra_state(model: nn.Module, source: Source) -> None:
    modules = _extra_state_of(model)
    for name in source.extra:
        modules[name].set_extra_state(source.read_extra(name))


def _extra_state_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, by its names in a state dict."""
    return {
        f"{path}._extra_state".removeprefix("."): module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _as_function(init: Init) -> Callable[[nn.Module], object]:
    return _reset if isinstance(init, str) else init


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


class PendingValues:
    """The values that a model on the meta device gets when it is placed.

    Args:
        model: the user's; one that has values is loaded at once.
        weights: as for :func:`materialize`.
        init: as for :func:`materialize`.

    Raises:
        WeightsError: a checkpoint that cannot be read, or does not fit a model with values.
        UsageError: an argument that cannot be.
    """

    def __init__(self, model: nn.Module, weights: Weights | None, init: Init | None) -> None:
        check_init(model, weights, init)
        self._model = model
        if weights is not None and is_on_meta(model):
            open_weights(weights)
        elif weights is not None:
            # At once: values that come at the first call could come over what was trained by then.
            load_in_place(model, weights, None)
            weights = init = None
        self._weights, self._init = weights, init

    def keep(self, weights: Weights) -> None:
        """Check values by name and shape, and keep them for the placement."""
        check_weights(self._model, open_weights(weights), {}, self._init)
        self._weights = weights

    def forget_weights(self) -> None:
        """Forget the checkpoint, as the model has got values in another way."""
        self._weights = None

    def fill(self, recording: Recording, devices: Sequence[torch.device]) -> bool:
        """Give the model its values once; later ones are the training's. Returns whether it did."""
        if self._weights is None and self._init is None:
            return False
        materialize(self._model, recording, devices, weights=self._weights, init=self._init)
        self._weights = self._init = None
        return True
