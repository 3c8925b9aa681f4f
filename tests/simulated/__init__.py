"""A simulated asynchronous accelerator: importing this registers device type ``"simulated"``.

It cannot be taken back: from here on ``torch.accelerator`` is this one, for the whole process. So
only a test run with ``--simulated`` imports it. See ``README.md``.
"""

import atexit
import importlib.util
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._decomp
import torch._meta_registrations

from ..simulated_build import extension

NAME = "simulated"


def _load() -> Any:
    built = extension()  # may be impossible: then there is no such device
    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location("_accelerator", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_accelerator = _load()


def set_delay(
    lo: int,
    hi: int,
    probability: float = 1.0,
    seed: int = 0,
    copy_lo: int = -1,
    copy_hi: int = -1,
) -> None:
    """Let operations begin late, by ``lo`` to ``hi`` microseconds.

    Args:
        lo: the shortest delay.
        hi: the longest; 0: none.
        probability: of a delay at all.
        seed: the k-th operation of a stream is delayed alike wherever this is equal.
        copy_lo: as ``lo``, for copies between devices and with the host; -1: ``lo``.
        copy_hi: as ``hi``.
    """
    _accelerator.set_delay(lo, hi, probability, seed, copy_lo, copy_hi)


def set_flags(
    poison: bool = True,
    races: bool = True,
    raise_races: bool = False,
    raise_syncs: bool = False,
    trace: bool = False,
) -> None:
    """Say what is looked for; what is not given gets its default.

    Args:
        poison: fill freed memory with NaN, in the order of its stream.
        races: look for accesses to memory that nothing orders.
        raise_races: raise where the later one of them is queued, and not only note it.
        raise_syncs: raise where the host waits for a device.
        trace: keep what ran when, for :func:`spans`.
    """
    _accelerator.set_flags(poison, races, raise_races, raise_syncs, trace)


@contextmanager
def flags(**given: bool) -> Iterator[None]:
    """Set some flags for a while, on top of those that are set. May be nested."""
    before = _accelerator.flags()
    set_flags(**{**before, **given})
    try:
        yield
    finally:
        set_flags(**before)


def counts() -> dict[str, int]:
    """How often what was seen: ``"sync: …"`` for each wait of the host, ``"races"``, and more."""
    return _accelerator.counts()


def syncs() -> dict[str, int]:
    """How often the host waited for a device, by what made it wait."""
    return {
        name.removeprefix("sync: "): n for name, n in counts().items() if name.startswith("sync: ")
    }


def races() -> list[str]:
    """The unordered accesses seen since the last :func:`reset`, 200 at most."""
    return _accelerator.races()


def error() -> str:
    """The first failure of a queued operation since the last :func:`reset`, or ``""``."""
    return _accelerator.error()


def spans() -> list[tuple[int, int, str, int, int]]:
    """What ran when, if ``trace`` is set: device, stream, name, start and end in nanoseconds."""
    return _accelerator.spans()


def delays() -> list[tuple[int, int, int]]:
    """Of :func:`spans`: device, stream, and by how many microseconds it began late."""
    return _accelerator.delays()


def settle() -> None:
    """Wait until every stream is empty. No host synchronization in the sense of :func:`counts`."""
    _accelerator.settle()


def reset() -> None:
    """Wait until every stream is empty, then forget all that was counted, seen and failed."""
    _accelerator.reset()


def sleep(microseconds: int) -> None:
    """Queue a kernel on the current stream that takes so long."""
    _accelerator.sleep(microseconds)


@contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Queue a kernel on a stream, or the current one, that takes until the end of the block."""
    if stream is None:
        release = _accelerator.hold()
    else:
        with stream:
            release = _accelerator.hold()
    try:
        yield
    finally:
        release()


# --- torch.simulated: what torch looks for in a backend's module


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _generator(device: Any = None) -> torch.Generator:
    return _accelerator.default_generator(_index(device))


def _default_stream(device: Any = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def _manual_seed_all(seed: int) -> None:
    for device in range(_accelerator.device_count()):
        _generator(device).manual_seed(seed)


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=NAME, total_memory=4 << 30)


def _register() -> None:
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # asked by torch.utils.checkpoint: keep its generators' states
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=_accelerator.device_count,
        current_device=accelerator.current_device_index,
        set_device=lambda device: accelerator.set_device_index(_index(device)),
        device=lambda device: accelerator.device_index(_index(device)),
        synchronize=lambda device=None: accelerator.synchronize(_index(device)),
        Stream=torch.Stream,
        Event=torch.Event,
        stream=lambda stream: stream,  # a torch.Stream is a context manager itself
        current_stream=lambda device=None: accelerator.current_stream(_index(device)),
        default_stream=_default_stream,
        default_generators=tuple(map(_generator, range(_accelerator.device_count()))),
        get_rng_state=lambda device=None: _generator(device).get_state(),
        set_rng_state=lambda state, device=None: _generator(device).set_state(state),
        manual_seed=lambda seed: _generator().manual_seed(seed),
        manual_seed_all=_manual_seed_all,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
        is_bf16_supported=lambda including_emulation=True: True,
        empty_cache=accelerator.empty_cache,
        memory_allocated=lambda device=None: accelerator.memory_allocated(_index(device)),
        max_memory_allocated=lambda device=None: accelerator.max_memory_allocated(_index(device)),
        get_device_properties=_properties,
        get_device_name=lambda device=None: _properties(device).name,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


_register()
atexit.register(settle)  # workers must not run kernels while the interpreter ends
