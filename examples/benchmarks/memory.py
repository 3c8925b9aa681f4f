"""What recomputation saves and costs: a transformer of 48 layers over 4 stages.

    python examples/benchmarks/memory.py            # on CUDA devices where there are some
    python examples/benchmarks/memory.py --layers 16

First the peak of activations for each mode, predicted from the recording and measured: on the
CPU by counting the bytes of live tensors, on CUDA by the allocator. Then, in one thread, what
recomputing all costs over the forward that it repeats, beside ``torch.utils.checkpoint`` on each
layer.
"""

import argparse
import copy
import statistics

from measure import interleaved, machine, table  # before torch: it sets OMP_NUM_THREADS

import torch
from models import gpt, mark
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.preparation import prepared

STAGES, CHUNKS, ROWS, LENGTH, VOCABULARY = 4, 8, 4, 128, 512
MODES = ("never", "except_last", "always")


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def peaks(model: nn.Module, devices: list[str], schedule: str, x: Tensor, y: Tensor) -> None:
    """Activations at their peak, stage by stage, for each mode."""
    print(f"{schedule}: activations at the peak, MiB, predicted / measured")
    off = []
    for mode in MODES:
        pipe = bp.Pipeline(
            model, devices=devices, chunks=CHUNKS, schedule=schedule, checkpoint=mode
        )
        for _ in range(2):  # the gradients are there, and the allocator is warm
            pipe.forward_backward(x, target=y, loss_fn=loss_of)
        with pipe.measured_memory() as report:
            pipe.forward_backward(x, target=y, loss_fn=loss_of)
        shown = []
        for stage in report.stages:
            assert stage.measured is not None
            predicted = stage.activations + stage.working
            measured = stage.measured - stage.parameters - stage.gradients
            shown.append(f"{predicted / 2**20:7.1f} / {measured / 2**20:.1f}")
            off.append(predicted / measured - 1)
        print(f"{mode:<12}", "   ".join(shown))
        pipe.unplace()
    print(f"the prediction is off by {100 * min(off):+.1f} to {100 * max(off):+.1f} %\n")


def costs(model: nn.Module, x: Tensor, y: Tensor, repeats: int) -> None:
    """Time of a step that recomputes everything, over F + B and F + B + F."""
    plain, checkpointed = copy.deepcopy(model), copy.deepcopy(model)
    for layer in list(checkpointed)[1:-1]:
        layer.forward = _checkpointed(layer.forward)
    pipes = {
        mode: bp.Pipeline(
            copy.deepcopy(model),
            devices=["cpu"] * STAGES,
            chunks=CHUNKS,
            schedule="sequential",
            checkpoint=mode,
        )
        for mode in ("never", "always")
    }
    parts = list(zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True))

    def forwards() -> None:
        for xs, ys in parts:
            loss_of(plain(xs), ys)

    def loop(net: nn.Module) -> None:
        for xs, ys in parts:
            (loss_of(net(xs), ys) / CHUNKS).backward()

    times = interleaved(
        {
            "plain: F": forwards,
            "plain: F + B": lambda: loop(plain),
            "torch.utils.checkpoint": lambda: loop(checkpointed),
            "Blockpipe, never": lambda: pipes["never"].forward_backward(
                x, target=y, loss_fn=loss_of
            ),
            "Blockpipe, always": lambda: pipes["always"].forward_backward(
                x, target=y, loss_fn=loss_of
            ),
        },
        repeats,
        warmup=1,
    )
    for a, b in zip(pipes["never"].parameters(), pipes["always"].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), "gradients differ"
    print(table(times, "plain: F + B"))
    rows = zip(*(times[name] for name in times), strict=True)
    over = [always / (never + f) for f, _, _, never, always in rows]
    torchs = [c / (both + f) for f, both, c, _, _ in zip(*times.values(), strict=True)]
    print(
        "over F + B + F, median of the rounds: Blockpipe "
        f"{statistics.median(over):.3f}, torch.utils.checkpoint {statistics.median(torchs):.3f}"
    )


def _checkpointed(forward):  # type: ignore[no-untyped-def]
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def main() -> None:
    """Memory first, then time."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, default=48)
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--repeats", type=int, default=7)
    options = arguments.parse_args()
    prepared.SMALL_OPERATION = prepared.SMALL_HOP = 0.0  # lanes, however small the layers are
    torch.manual_seed(0)
    model = gpt(
        width=options.width, heads=4, layers=options.layers, vocabulary=VOCABULARY, length=LENGTH
    )
    model = mark(model, STAGES)
    x, y = torch.randint(0, VOCABULARY, (2, CHUNKS * ROWS, LENGTH)).unbind()
    count = torch.cuda.device_count()
    devices = [f"cuda:{i}" for i in range(STAGES)] if count >= STAGES else ["cpu"] * STAGES
    print(machine(), f"{options.layers} layers, {CHUNKS} micro-batches of {ROWS}", sep="\n")
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        peaks(model, devices, schedule, x, y)
    costs(model, x, y, options.repeats)


if __name__ == "__main__":
    main()
