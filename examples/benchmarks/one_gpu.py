"""What a pipeline costs on one accelerator: 1, 2 and 4 stages on it beside the plain loop.

    python examples/benchmarks/one_gpu.py --workload gpt unet --mode eager compiled graphs
    python examples/benchmarks/one_gpu.py --device cpu --tiny  # only tries the script

All gradients are compared with the plain micro-batch loop's, then all are timed in turn, in one
run. There is nothing to gain here, one device does all the work; what a step takes beyond the
plain loop's is what the pipeline costs. Where all stages share a device, Blockpipe cuts the first
step at the stages, and runs the later ones as the plain loop. ``--cut`` keeps the cut.
"""

import argparse
import copy
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from measure import Seconds, interleaved, machine, table  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import models
from accelerators import allocated, best_device, is_accelerator, name_of, now, peak
from models import Batch, Chain, mark, masks, texts
from workloads import images, token_loss, vectors

import blockpipe as bp
from blockpipe.schedules.builders import SCHEDULES

MODES = ("eager", "compiled", "graphs")
WARMUP = 3  # steps: the first is cut, the second captures or compiles what the first did not
# How far gradients may be from the plain, eager loop's, of their norm. Eager kernels are the same
# ones; those that add up in any order differ by some roundings, of 4e-3 in bfloat16. Compiled ones
# round elsewhere, and the norms of a small image make 1e-2 of that even in float32. The limits are
# guesses between that and a lost micro-batch: of eight, a third of the norm.
TOLERANCE = {"eager": 1e-2, "compiled": 1e-1, "graphs": 1e-2}


@dataclass(frozen=True)
class Workload:
    """A model, its micro-batches, and the loss."""

    model: Callable[[], Chain]
    batch: Batch
    rows: int  # in a micro-batch
    chunks: int
    loss: Callable[[Tensor, Tensor], Tensor]  # a mean over the rows
    dtype: torch.dtype = torch.float32


def exact_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy in float32, as one trains in bfloat16."""
    return token_loss(logits.float(), target)


def gpt(width: int, heads: int, layers: int, vocabulary: int, length: int) -> Workload:
    """A causal language model in bfloat16, a text in a micro-batch."""

    def make() -> Chain:
        sizes = {"width": width, "heads": heads, "layers": layers}
        return models.gpt(**sizes, vocabulary=vocabulary, length=length)

    return Workload(make, texts(vocabulary, length), 1, 8, exact_token_loss, torch.bfloat16)


def workloads(*, tiny: bool) -> dict[str, Workload]:
    """By name; ``gpt`` has 1.05 billion parameters."""
    mask_loss, class_loss = F.binary_cross_entropy_with_logits, F.cross_entropy
    if tiny:
        photos = images(64, 10, dense=False)
        return {
            "gpt": gpt(32, 2, 4, 128, 16),
            "unet": Workload(lambda: models.unet(2, 4), masks(64), 1, 4, mask_loss),
            "resnet101": Workload(lambda: models.resnet101(10), photos, 2, 2, class_loss),
            "small": Workload(lambda: models.small(64, 12), vectors(64), 32, 4, F.mse_loss),
        }
    photos = images(224, 1000, dense=False)
    return {
        "gpt": gpt(1792, 14, 24, 32768, 2048),
        "unet": Workload(models.unet, masks(192), 8, 4, mask_loss),
        "resnet101": Workload(models.resnet101, photos, 32, 4, class_loss),
        "small": Workload(lambda: models.small(64, 100), vectors(64), 32, 8, F.mse_loss),
    }


@dataclass
class Candidate:
    """A way to do the step on a model of its own, and what was seen of it."""

    device: torch.device
    model: nn.Module
    step: Callable[[], object]
    hosts: list[float] = field(default_factory=list)  # seconds until the call returned
    peak: int = 0  # bytes: parameters, gradients, activations, buffers of its own

    def run(self) -> Seconds:
        """A step as in training, without gradients at first; takes its times."""
        self.model.zero_grad()
        begun = now(self.device)
        self.step()
        self.hosts.append(time.perf_counter() - begun)
        return Seconds(now(self.device) - begun)

    def gradients(self) -> list[Tensor]:
        """Parameter by parameter; each has one, since all that these models have is used."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


@dataclass(frozen=True)
class Setting:
    """What all candidates of a table have in common."""

    workload: Workload
    device: torch.device
    schedule: str
    stages: Sequence[int]
    model: Chain
    x: Tensor
    y: Tensor

    def plain(self, compiled: Literal["blocks", "whole"] | None = None) -> Candidate:
        """The loop that everybody writes, compiled block by block or in one piece, if at all."""
        model, work = copy.deepcopy(self.model), self.workload
        parts: dict[str | None, list[nn.Module]] = {"blocks": list(model), "whole": [model]}
        for part in parts.get(compiled, []):
            part.compile(dynamic=False)

        def step() -> Tensor:
            total = torch.zeros((), device=self.device)
            for xs, ys in zip(self.x.chunk(work.chunks), self.y.chunk(work.chunks), strict=True):
                loss = work.loss(model(xs), ys) / work.chunks
                loss.backward()
                total += loss.detach()
            return total

        return Candidate(self.device, model, step)

    def pipe(self, stages: int, mode: str, stack: ExitStack) -> Candidate:
        """So many stages on the one device. On the CPU the number makes them share a lane."""
        model, work = mark(copy.deepcopy(self.model), stages), self.workload
        devices = [self.device] * stages if is_accelerator(self.device) else ["cpu:0"] * stages
        pipe = bp.Pipeline(model, devices=devices, chunks=work.chunks, schedule=self.schedule)
        stack.callback(pipe.close)
        if mode == "compiled":
            pipe.compile(dynamic=False)
        elif mode == "graphs":
            pipe.compile(cuda_graphs=True)

        def step() -> Tensor:
            return pipe.forward_backward(self.x, target=self.y, loss_fn=work.loss).loss

        return Candidate(self.device, model, step)

    def makers(self, mode: str, stack: ExitStack) -> dict[str, Callable[[], Candidate]]:
        """By name; made one by one, so that the memory of each can be told apart."""
        makers: dict[str, Callable[[], Candidate]]
        makers = {"plain loop": self.plain}
        if mode == "compiled":  # one stage is compiled in one piece, several in blocks
            makers["plain loop, compiled whole"] = partial(self.plain, "whole")
            makers["plain loop, compiled blocks"] = partial(self.plain, "blocks")
        for stages in self.stages:
            name = f"{stages} stages" if stages > 1 else "1 stage"
            makers[name] = partial(self.pipe, stages, mode, stack)
        return makers


def main() -> None:
    """One table for each workload and mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(workloads(tiny=True))
    parser.add_argument("--workload", nargs="+", choices=names, default=names)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--schedule", choices=[*SCHEDULES, "auto", "uncut"], default="1f1b")
    parser.add_argument(
        "--cut", action="store_true", help="cut every step at the stages: schedule='sequential'"
    )
    parser.add_argument("--device", type=torch.device, help="cpu: to try the script, with --tiny")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    options = parser.parse_args()
    if options.device is None:
        options.device = best_device()
        if options.device.type == "cpu":
            parser.error("there is no accelerator here; --device cpu --tiny tries the script")
    schedule = "sequential" if options.cut else options.schedule
    # Blocks of one class and many shapes share the code whose compiled versions are counted.
    torch._dynamo.config.recompile_limit = 256
    print(f"{machine()}, {name_of(options.device)}")
    print(f"schedule {schedule!r}: {what_is_cut(schedule)}")
    print("peak: parameters, gradients, activations of a candidate, without a graph's own pool")
    print("host: time a micro-batch until the call returns; up to the step's where a queue is full")
    for name in options.workload:
        for mode in options.mode:
            lacks = lacking(mode, options.device)
            if lacks is not None:
                print(f"\n{name}, {mode}: left out, {lacks}")
                continue
            work = workloads(tiny=options.tiny)[name]
            tensors = sample(work, options.device)
            setting = Setting(work, options.device, schedule, options.stages, *tensors)
            count = sum(p.numel() for p in setting.model.parameters())
            print(
                f"\n{name}, {mode}: {count / 1e6:.4g} M parameters in {work.dtype}, "
                f"{work.chunks} micro-batches of {[work.rows, *setting.x.shape[1:]]}",
                flush=True,
            )
            print(measure(setting, mode, options.repeats), flush=True)


def what_is_cut(schedule: str) -> str:
    """What the steps are that are timed."""
    if schedule == "sequential":
        return "every step is cut at the stages"
    if schedule == "uncut":
        return "no step is cut"
    return "the first step is cut at the stages, those timed run as the plain loop; see --cut"


def lacking(mode: str, device: torch.device) -> str | None:
    """What a mode needs and is not there."""
    if mode == "eager":
        return None
    if mode == "graphs" and device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if "cuda_graphs" not in inspect.signature(bp.Pipeline.compile).parameters:
        return "this Blockpipe has no Pipeline.compile(cuda_graphs=…)"
    return None


def sample(work: Workload, device: torch.device) -> tuple[Chain, Tensor, Tensor]:
    """The model and a batch, made on the device; the same ones at each call."""
    torch.manual_seed(0)
    with device:
        model = work.model().to(work.dtype)
        x, y = work.batch(work.chunks * work.rows)
    return model, x, y


def measure(setting: Setting, mode: str, repeats: int) -> str:
    """Check the gradients and count the memory, then time all in turn."""
    candidates: dict[str, Candidate] = {}
    notes: dict[str, str] = {}
    expected: list[Tensor] = []
    work = setting.workload
    # What the libraries keep for themselves (cuBLAS its workspace) is nobody's: it is there first.
    work.loss(setting.model(setting.x[: work.rows]), setting.y[: work.rows]).backward()
    setting.model.zero_grad()
    with ExitStack() as stack:
        makers = setting.makers(mode, stack)
        for name, make in makers.items():
            gc.collect()
            before = allocated(setting.device)
            candidate = candidates[name] = make()
            for _ in range(WARMUP):
                candidate.run()
            allocated(setting.device)
            candidate.run()
            candidate.peak = peak(setting.device) - before
            expected = expected or [g.clone() for g in candidate.gradients()]
            notes[name] = compare(name, candidate.gradients(), expected, TOLERANCE[mode])
            candidate.model.zero_grad()
        runs = {name: candidate.run for name, candidate in candidates.items()}
        times = interleaved(dict[str, Callable[[], object]](runs), repeats, warmup=1)
    for name, candidate in candidates.items():
        host = statistics.median(candidate.hosts[-repeats:]) / work.chunks
        seen = f"{candidate.peak / 2**30:.2f} GiB" if candidate.peak else "-"
        notes[name] = f"peak {seen:>9}  host {1e3 * host:8.3f} ms  gradients {notes[name]}"
    return table(times, [name for name in times if name.startswith("plain")][-1], notes)


def compare(
    name: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> str:
    """How near the gradients are to the plain loop's.

    Raises:
        AssertionError: not near enough.
    """
    pairs = list(zip(found, expected, strict=True))
    if all(torch.equal(g, e) for g, e in pairs):
        return "to the bit"
    error = torch.stack([(g.float() - e.float()).norm() for g, e in pairs]).norm()
    error /= torch.stack([e.float().norm() for _, e in pairs]).norm()
    if not error < tolerance:
        raise AssertionError(f"{name}: gradients differ by {error:.1e} of their norm")
    return f"to {error:.0e} (< {tolerance:.0e})"


if __name__ == "__main__":
    main()
