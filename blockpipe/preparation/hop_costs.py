"""The costs of hops on the devices of their stages, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..costs.probing import copy_line, rates_of
from ..costs.rates import Rates
from ..devices.devices import is_asynchronous
from ..recording.entries import ActivationBytes
from ..recording.recording import Recording
from ..schedules.simulation import Costs


def rates_of_stages(devices: Sequence[torch.device], lanes: int) -> list[Rates]:
    """Return the rates of each stage's device; they are measured when they are first used.

    Args:
        devices: the stages' devices.
        lanes: the number of lanes that run at once; on the CPU they share its threads.
    """
    alone = any(map(is_asynchronous, devices))
    threads = torch.get_num_threads() if alone else max(1, torch.get_num_threads() // lanes)
    return [rates_of(device, threads) for device in devices]


def hop_costs(
    recording: Recording,
    held: Sequence[ActivationBytes],
    devices: Sequence[torch.device],
    rates: Sequence[Rates],
    offloaded: Collection[int] = (),
) -> Costs:
    """Return the costs of a recording's hops.

    Args:
        recording: the recording.
        held: the activations that each hop keeps, as it is recomputed.
        devices: the stages' devices.
        rates: the devices' rates.
        offloaded: the hops whose activations are in host memory between forward and backward.
    """
    hops = recording.hops
    backward = [rates[hop.stage].backward(hop.work) for hop in hops]
    sent = [0.0] * len(hops)
    for crossing in recording.crossings:
        line = copy_line(devices[crossing.from_stage], devices[crossing.to_stage])
        sent[crossing.to_hop - 1] += line.seconds(crossing.bytes)
    recompute = [
        rates[hop.stage].forward(kept.recompute) for hop, kept in zip(hops, held, strict=True)
    ]
    for hop in offloaded:
        line = copy_line(torch.device("cpu"), devices[hops[hop].stage])
        recompute[hop] += line.seconds(held[hop].full)
    return Costs(
        forward=[rates[hop.stage].forward(hop.work) for hop in hops],
        backward=backward,
        weight=[seconds / 2 for seconds in backward],
        transfer=sent,
        activation=[float(kept.full) for kept in held],
        recompute=recompute,
        dropped=[float(kept.full - kept.bytes) for kept in held],
    )
