"""A simulated asynchronous accelerator: importing this registers device type "simulated"."""

import importlib.util
import types

import torch
import torch._meta_registrations  # noqa: F401  what shapes results have
import torch._decomp  # noqa: F401

from .build import extension

NAME = "simulated"
torch.utils.rename_privateuse1_backend(NAME)
_spec = importlib.util.spec_from_file_location("_accelerator", extension())
_accelerator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_accelerator)
counts, error, races, reset = (
    _accelerator.counts,
    _accelerator.error,
    _accelerator.races,
    _accelerator.reset,
)
set_delay, set_flags = _accelerator.set_delay, _accelerator.set_flags
settle, sleep, spans = _accelerator.settle, _accelerator.sleep, _accelerator.spans


def _index(device=None):
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return torch.accelerator.current_device_index() if found is None else found


class device:  # noqa: N801
    def __init__(self, device):
        self.idx = _index(device)

    def __enter__(self):
        self.prev = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *_):
        torch.accelerator.set_device_index(self.prev)
        return False


def _module():
    m = types.ModuleType(f"torch.{NAME}")
    m.is_available = lambda: True
    m.is_initialized = lambda: True
    m.init = m._lazy_init = lambda: None
    m._is_in_bad_fork = lambda: False
    m.device_count = _accelerator.device_count
    m.current_device = torch.accelerator.current_device_index
    m.set_device = lambda d: torch.accelerator.set_device_index(_index(d))
    m.device = device
    m.synchronize = lambda d=None: torch.accelerator.synchronize(_index(d))
    m.current_stream = lambda d=None: torch.accelerator.current_stream(_index(d))
    m.default_stream = lambda d=None: torch.Stream(
        stream_id=0, device_index=_index(d), device_type=20
    )
    m.stream = lambda s: s
    m.Stream = torch.Stream
    m.Event = torch.Event
    m.default_generators = tuple(
        _accelerator.default_generator(i) for i in range(_accelerator.device_count())
    )
    m.get_rng_state = lambda d=NAME: _accelerator.default_generator(_index(d)).get_state()

    def set_rng_state(state, d=NAME):
        _accelerator.default_generator(_index(d)).set_state(state)

    m.set_rng_state = set_rng_state

    def manual_seed_all(seed):
        for g in m.default_generators:
            g.manual_seed(seed)

    m.manual_seed_all = manual_seed_all
    m.manual_seed = lambda seed: m.default_generators[_index()].manual_seed(seed)
    m.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    m.is_bf16_supported = lambda including_emulation=True: True
    m.empty_cache = torch.accelerator.empty_cache
    m.memory_allocated = lambda d=None: torch.accelerator.memory_allocated(_index(d))
    m.max_memory_allocated = lambda d=None: torch.accelerator.max_memory_allocated(_index(d))
    m.get_device_properties = lambda d=None: types.SimpleNamespace(
        name=f"simulated {_index(d)}", total_memory=4 << 30
    )
    m.get_device_name = lambda d=None: "simulated"
    return m


torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
