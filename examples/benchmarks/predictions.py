"""How well a step is predicted: its time and its memory, beside what is measured.

    python examples/benchmarks/predictions.py                         # two CPU stages
    python examples/benchmarks/predictions.py --devices cuda:0 cuda:1
    python examples/benchmarks/predictions.py --simulated 300         # microseconds a kernel

*Work*, on the CPU: forward and backward of a micro-batch in one thread, by the processor time that
they take: it holds where other processes are on the cores as well, and the others do not.
*Recording*: a pipeline's summary, before anything ran, by the rates that are measured on the
devices. *Balance*: ``bp.balance``, which times the model. The simulated accelerator is that of the
tests, where each kernel takes so many microseconds besides its time on the CPU; it needs a C++
compiler.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from measure import interleaved, machine  # before torch: it sets OMP_NUM_THREADS

import torch
from workloads import WORKLOADS, Workload

import blockpipe as bp
from blockpipe.costs.probing import copy_line, rates_of
from blockpipe.costs.work import CONVOLUTION, KINDS, PRODUCT

NAMES = ("mlp", "resnet", "gpt", "unet")


def probes(devices: list[str]) -> None:
    """What all rates of the first device take to measure."""
    begun = time.perf_counter()
    rates = rates_of(devices[0])
    for kind in KINDS:
        rates.pair(kind, "float32" if kind in (PRODUCT, CONVOLUTION) else "")
    copy_line(torch.device(devices[0]), torch.device(devices[1]))
    print(f"{rates.source}, in {time.perf_counter() - begun:.2f} s")


def shown(name: str, how: str, predicted: list[float], taken: list[float]) -> float:
    """A line of the rounds; returns the median ratio."""
    ratios = [p / t for p, t in zip(predicted, taken, strict=True)]
    middle = statistics.median(ratios)
    print(
        f"{name:<8} {how:<10} predicted {1e3 * statistics.median(predicted):8.1f} ms, measured "
        f"{1e3 * statistics.median(taken):8.1f} ms, ratio {middle:.2f} "
        f"({', '.join(f'{r:.2f}' for r in ratios)})",
        flush=True,
    )
    return middle


def busy(name: str, work: Workload, repeats: int) -> None:
    """A micro-batch in one thread, by the processor's clock."""
    model, x, y = work.sample(1)
    rates = rates_of("cpu", 1)
    (hop,) = bp.record(model, x, plan=bp.StagePlan([])).hops
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = []
    for _ in range(4 * repeats):
        begun = time.thread_time()
        work.loss(model(x), y).backward()
        taken.append(time.thread_time() - begun)
    torch.set_num_threads(threads)
    shown(name, "work", [rates.forward(hop.work) + rates.backward(hop.work)], [min(taken)])


def times(name: str, work: Workload, devices: list[str], options: argparse.Namespace) -> None:
    """A step's time, from the recording and from balance."""
    chunks = options.chunks
    model, x, y = work.sample(chunks)
    micro, target = x[: work.rows], y[: work.rows]
    predicted: dict[str, list[float]] = {"recording": [], "balance": []}
    taken: dict[str, list[float]] = {"recording": [], "balance": []}
    for _ in range(options.rounds):
        for how in predicted:
            plan = None
            if how == "balance":
                plan = bp.balance(
                    *(model, micro, 2),
                    target=target,
                    loss_fn=work.loss,
                    chunks=chunks,
                    devices=devices,
                    repeats=options.repeats,
                )
                predicted[how].append(plan.step_seconds)
            else:
                bp.begin_blocks(model, {"1": 1})
            with bp.Pipeline(model, devices=devices, chunks=chunks, plan=plan) as pipe:
                if how == "recording":
                    found = pipe.summary(x).prediction
                    assert found is not None
                    predicted[how].append(found.step_seconds)
                step = partial(pipe.forward_backward, x, target=y, loss_fn=work.loss)
                step()
                taken[how].append(statistics.median(measured(step, devices, options.repeats)))
            pipe.unplace()
            bp.remove_blocks(model)
    for how, seconds in predicted.items():
        shown(name, how, seconds, taken[how])


def measured(step: partial[bp.StepResult], devices: list[str], repeats: int) -> list[float]:
    """Seconds of steps, each until the devices are done."""

    def run() -> None:
        step()
        for device in devices:
            if device != "cpu":
                torch.accelerator.synchronize(torch.device(device))

    return interleaved({"": run}, repeats, warmup=1)[""]


def memory(name: str, work: Workload, devices: list[str], chunks: int) -> None:
    """The peaks of both stages."""
    gc.collect()  # what is left of earlier models would be measured with this one
    model, x, y = work.sample(chunks)
    bp.begin_blocks(model, {"1": 1})
    with bp.Pipeline(model, devices=devices, chunks=chunks) as pipe:
        predicted = pipe.memory(x)
        for _ in range(2):
            pipe.forward_backward(x, target=y, loss_fn=work.loss)
        with pipe.measured_memory() as report:
            pipe.forward_backward(x, target=y, loss_fn=work.loss)
    cells = [
        f"{before.peak / 2**20:7.1f} / {after.measured / 2**20:7.1f} MiB, "
        f"{before.peak / after.measured:.2f}"
        for before, after in zip(predicted.stages, report.stages, strict=True)
        if after.measured
    ]
    print(f"{name:<8} memory     predicted / measured: {'; '.join(cells)}", flush=True)


def main() -> None:
    """All, for all models or for those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], default=[])
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"])
    parser.add_argument("--simulated", type=int, metavar="MICROSECONDS")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    devices = list(options.devices)
    torch.set_num_threads(2 if devices[0] == "cpu" and options.simulated is None else 1)
    if options.simulated is not None:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from tests import simulated

        delay = options.simulated
        simulated.set_delay(delay, delay, 1.0, 0, delay, delay)
        simulated.set_flags(poison=False, races=False)
        devices = ["simulated:0", "simulated:1"]
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    bp.record(torch.nn.Linear(1, 1), torch.ones(1, 1))  # torch imports what recordings need
    probes(devices)
    for name in options.names or NAMES:
        if devices[0] == "cpu":
            busy(name, WORKLOADS[name], options.repeats)
        times(name, WORKLOADS[name], devices, options)
        memory(name, WORKLOADS[name], devices, options.chunks)


if __name__ == "__main__":
    main()
