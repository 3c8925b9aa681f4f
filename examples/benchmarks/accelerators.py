"""What the benchmarks ask of a device; on the CPU there is nothing to wait for or to count."""

import time

import torch


def best_device() -> torch.device:
    """This machine's current accelerator device, with its number, or the CPU."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def is_accelerator(device: torch.device) -> bool:
    """Whether the host runs ahead of the device."""
    return device.type != "cpu"


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def now(device: torch.device) -> float:
    """The time at which the device has done all that it was given."""
    wait(device)
    return time.perf_counter()


def name_of(device: torch.device) -> str:
    """What it is called, if it says."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({name(device)})" if name is not None else str(device)


def allocated(device: torch.device) -> int:
    """Bytes of tensors that lie on the device; from here on the peak is counted anew."""
    if not is_accelerator(device):
        return 0
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)


def peak(device: torch.device) -> int:
    """The most bytes of tensors since :func:`allocated` was asked last."""
    return torch.accelerator.max_memory_allocated(device) if is_accelerator(device) else 0
