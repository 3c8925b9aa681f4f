"""Where to cut: how good the cuts are, how fast they are found, and how well a step is predicted.

    python examples/benchmarks/balance.py [chains | solve | predict]

``chains`` needs torchgpipe beside it (requirements-peers.txt), and leaves it out where it is not
there; ``solve`` and ``predict`` need torchvision, and transformers.
"""

import argparse
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, combinations, pairwise

from measure import interleaved, machine  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.partitioning import optimum
from blockpipe.partitioning import search as cut_search

CHAINS = 500


def chains() -> None:
    """Random chains, against the best there is: torchgpipe's heuristic and ours."""
    if importlib.util.find_spec("torchgpipe") is None:
        print("torchgpipe is left out: pip install -r examples/benchmarks/requirements-peers.txt")
        solve = None
    else:
        from torchgpipe.balance.blockpartition import solve
    draw = random.Random(0)
    missed = {"torchgpipe": [], "blockpipe": []}
    for _ in range(CHAINS):
        count = draw.randint(4, 16)
        stages = draw.randint(2, min(5, count))
        weights = [draw.randint(1, 100) for _ in range(count)]
        until = [0, *accumulate(weights)]
        best = min(
            max(until[b] - until[a] for a, b in pairwise((0, *inner, count)))
            for inner in combinations(range(1, count), stages - 1)
        )
        ends = [0, *accumulate(bp.partition_balanced(weights, stages))]
        found = {"blockpipe": max(until[b] - until[a] for a, b in pairwise(ends))}
        if solve is not None:
            found["torchgpipe"] = max(map(sum, solve(weights, stages)))
        for name, worst in found.items():
            missed[name].append(worst / best)
    for name, ratios in missed.items():
        worse = [r for r in ratios if r > 1]
        if ratios:
            print(
                f"{name:<10}  misses the best in {len(worse)} of {len(ratios)} chains, "
                f"by up to {max(ratios):.2f} ×"
            )


def gpt(layers: int, width: int, heads: int, length: int, vocabulary: int = 1000) -> nn.Module:
    """A GPT-2 of transformers, with random values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def solving() -> None:
    """ResNet-152 and a GPT of 96 layers over 8 stages, on the meta device."""
    from torchvision.models import resnet152

    with torch.device("meta"):
        models: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {
            "ResNet-152": (resnet152(), {"x": torch.zeros(8, 3, 224, 224)}),
            "GPT, 96 layers": (
                gpt(96, 12288, 96, 1024, 50257),
                {"input_ids": torch.zeros(1, 1024, dtype=torch.long)},
            ),
        }
    for name, (model, kwargs) in models.items():
        spent = []
        search = optimum.best_bounds

        def timed(*args: object, search=search, spent=spent, **options: object) -> object:
            begun = time.perf_counter()
            try:
                return search(*args, **options)
            finally:
                spent.append(time.perf_counter() - begun)

        begun = time.perf_counter()
        recording = bp.record(model, (), kwargs, plan=bp.StagePlan([]))
        recorded = time.perf_counter() - begun
        cut_search.best_bounds = timed
        begun = time.perf_counter()
        plan = bp.balance(model, (), 8, kwargs=kwargs, chunks=32)
        whole = time.perf_counter() - begun
        cut_search.best_bounds = search
        print(
            f"{name}: {len(recording.segments)} segments; recorded in {recorded:.2f} s; searched "
            f"in {sum(spent):.3f} s; balance() as a whole, with two recordings, {whole:.2f} s; "
            f"costliest stage {100 * (plan.imbalance - 1):.1f} % over the mean"
        )


def perceptron() -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """Linear layers that grow and shrink."""
    widths = [256, 1024, 1536, 2048, 1024, 512, 1536, 256]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(256, 256), torch.randn(256, 256), F.mse_loss


def resnet() -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """torchvision's ResNet-50 on small images."""
    from torchvision.models import resnet50

    return resnet50(), torch.randn(8, 3, 96, 96), torch.randint(1000, (8,)), F.cross_entropy


def transformer() -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """A small GPT-2."""

    def loss(output: object, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    ids = torch.randint(1000, (4, 128))
    return gpt(6, 384, 6, 128), ids, ids, loss


def unet() -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """Convolutions with long skips."""
    return UNet(24), torch.randn(4, 3, 96, 96), torch.randn(4, 3, 96, 96), F.mse_loss


class UNet(nn.Module):
    """Three levels down and up; each level's result is read again on the way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_block(a, b) for a, b in pairwise(sizes))
        self.middle = _block(4 * width, 4 * width)
        self.up = nn.ModuleList(_block(2 * b, max(a, width)) for a, b in pairwise(sizes))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1))
        return self.head(x)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    )


PREDICTED = {
    "perceptron": perceptron,
    "resnet50": resnet,
    "gpt2": transformer,
    "unet": unet,
}


def predicting(chunks: int, repeats: int, rounds: int) -> None:
    """On two CPU stages: the step that balance() predicts beside the one that is measured."""
    torch.set_num_threads(2)  # one for each stage
    for name, make in PREDICTED.items():
        torch.manual_seed(0)
        model, x, y, loss_fn = make()
        predicted, taken = [], []
        for _ in range(rounds):
            plan = bp.balance(
                model, x, 2, target=y, loss_fn=loss_fn, chunks=chunks, repeats=repeats
            )
            predicted.append(plan.step_seconds)
            batch, target = torch.cat([x] * chunks), torch.cat([y] * chunks)
            with bp.Pipeline(model, devices=["cpu"] * 2, chunks=chunks, plan=plan) as pipe:
                step = partial(pipe.forward_backward, batch, target=target, loss_fn=loss_fn)
                taken.append(statistics.median(interleaved({"": step}, repeats, warmup=2)[""]))
        ratios = [p / t for p, t in zip(predicted, taken, strict=True)]
        print(
            f"{name:<12} predicted {1e3 * statistics.median(predicted):7.1f} ms, measured "
            f"{1e3 * statistics.median(taken):7.1f} ms, ratio {statistics.median(ratios):.2f} "
            f"({', '.join(f'{r:.2f}' for r in ratios)}); stage 1 begins at "
            f"{plan.shares[1].begins}; {plan.source}",
            flush=True,
        )


def main() -> None:
    """All three, or the named ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=["chains", "solve", "predict"])
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    what = options.what or ["chains", "solve", "predict"]
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    if "chains" in what:
        chains()
    if "solve" in what:
        solving()
    if "predict" in what:
        predicting(options.chunks, options.repeats, options.rounds)


if __name__ == "__main__":
    main()
