"""Models larger than any device: recorded, planned and summarized on the meta device, timed.

    python examples/benchmarks/large_models.py
    python examples/benchmarks/large_models.py unet --convolutions 48 --base 160 --stages 8
    python examples/benchmarks/large_models.py llama --print

One is torchgpipe's U-Net (24, 160), which it trains on four devices with recomputation; (48, 160)
is its model for eight. The other is Llama 3 70B, in eight stages. Nothing here has memory: a
stage's would come from a checkpoint, see docs/how-to/large-models.md.
"""

import argparse
import resource
import sys
import time
from itertools import pairwise

from measure import machine  # before torch: it sets OMP_NUM_THREADS

import torch

from models import Chain, unet

import blockpipe as bp


def mark_by_parameters(chain: Chain, stages: int) -> None:
    """Begin stages at blocks, with about the same number of parameters in each."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in chain]
    share, before, begins = sum(sizes) / stages, 0, {}
    for number, size in enumerate(sizes):
        stage = int((before + size / 2) / share)
        if stage > len(begins):
            begins[str(number)] = stage
        before += size
    bp.begin_blocks(chain, begins)


def u_net(options: argparse.Namespace) -> tuple[str, torch.nn.Module, tuple, dict]:
    """torchgpipe's U-Net, with stages of about the same number of parameters."""
    with torch.device("meta"):
        net = unet(options.convolutions, options.base)
    mark_by_parameters(net, options.stages)
    image = torch.zeros(1, 3, options.size, options.size)
    return f"U-Net ({options.convolutions}, {options.base})", net, (image,), {}


def llama(options: argparse.Namespace) -> tuple[str, torch.nn.Module, tuple, dict]:
    """Llama 3 70B, with as many layers on each of its stages."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=options.layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        net = LlamaForCausalLM(config)
    stages = 2 * options.stages
    begins = {
        f"model.layers.{stage * options.layers // stages}": stage for stage in range(1, stages)
    }
    bp.begin_blocks(net, begins)
    ids = torch.zeros(1, options.tokens, dtype=torch.long)
    return f"Llama, {options.layers} layers", net, (ids,), {"labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help="unet, llama; none given: both")
    parser.add_argument("--convolutions", type=int, default=24, help="of the U-Net, a level")
    parser.add_argument("--base", type=int, default=160, help="channels of its first level")
    parser.add_argument("--size", type=int, default=192, help="of an image, in pixels")
    parser.add_argument("--layers", type=int, default=80, help="of the Llama")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--stages", type=int, default=4, help="of the U-Net; the Llama has twice")
    parser.add_argument("--print", action="store_true", help="the summaries too")
    options = parser.parse_args()

    print(machine())
    for make in [
        {"unet": u_net, "llama": llama}[name] for name in options.models or ("unet", "llama")
    ]:
        times = [time.perf_counter()]
        name, net, args, kwargs = make(options)
        times.append(time.perf_counter())
        recording = bp.record(net, args, kwargs)
        times.append(time.perf_counter())
        recording.check()
        recording.plan.to_json()
        times.append(time.perf_counter())
        summary = recording.summary()
        text = str(summary)
        deep = str(recording.summary(depth=100))
        times.append(time.perf_counter())

        print(f"{name}: {summary.parameters / 1e9:.2f} B parameters, {len(recording.calls)} calls")
        for stage in summary.stages:
            print(f"  stage {stage.stage}: {stage.parameters / 1e9:.2f} B")
        built, recorded, planned, told = (after - before for before, after in pairwise(times))
        print(
            f"built {built:.2f} s, recorded {recorded:.2f} s, planned {planned:.2f} s, summarized "
            f"{told:.2f} s ({len(text.splitlines())} lines, opened wholly {len(deep.splitlines())})"
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"largest resident set: {peak / 2 ** (20 if sys.platform == 'linux' else 30):.2f} GiB"
        )
        print(f"seconds in all: {times[-1] - times[0]:.1f}")
        if options.print:
            print(text)


if __name__ == "__main__":
    main()
