"""torchdistpackage's door: its pipeline guide as printed, and what one step is there."""

import copy
import functools
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockpipe.compat import torchdistpackage
from blockpipe.compat.torchdistpackage import dist, launch

from ..stage_devices import assert_close, device_type, stages

PARTITION = """
    layer_list = [
        'conv1', 'bn1', 'relu', 'maxpool', 'layer1', 'layer2', 'layer3', 'layer4', 'avgpool',
        lambda x: torch.flatten(x, 1), 'fc'
    ]
    flat_model = flatten_model(model, layer_list , return_list=True)
    md_list = partition_uniform(flat_model)
    model = torch.nn.Sequential(*md_list)

    model = DDP(model)
"""

TRAIN = """
    # adapted from DeiT
    for samples, targets in data_loader:
        dist.broadcast(samples, tpc.get_ranks_in_group('pipe')[0], tpc.get_group('pipe'))
        dist.broadcast(targets, tpc.get_ranks_in_group('pipe')[0], tpc.get_group('pipe'))

        loss=torch.rand(1).cuda()

        inputs = []
        if tpc.is_first_in_pipeline_group():
            inputs.append(samples)
        else:
            inputs.append(targets)

        # this line is not necessary, forward_backward will do it.
        optimizer.zero_grad()

        # an example of customized backward_fn
        def bwd_fn(output_obj, output_obj_grad):
            if output_obj_grad is None:
                model.backward(output_obj)
            else:
                model.backward_grad(output_obj, output_obj_grad)

        def fwd_fn(inputs):
            with torch.cuda.amp.autocast(dtype=torch.bfloat16):
                if tpc.is_first_in_pipeline_group():
                    out = model(inputs)
                    return out
                else:
                    out = model(inputs[0])
                    loss = criterion(samples, out, inputs[1])
                    # deal with loss ...
                    return loss

        num_microbatches=4
        forward_backward(
            optimizer,
            fwd_fn,
            None,   # for simple backward func like loss.backward, we can pass None
            inputs,
            num_microbatches=num_microbatches,
            forward_only=False,
            dtype=torch.bfloat16,
            scatter_gather_tensors=False)

        total_norm = clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
"""

EVALUATE = """
for images, target in data_loader:
    images = images.to(device, non_blocking=True)
    target = target.to(device, non_blocking=True)
    dist.broadcast(target, tpc.get_ranks_in_group('pipe')[0], tpc.get_group('pipe'))

    inputs = []
    if tpc.is_first_in_pipeline_group():
        inputs = images

    def eval_fwd(img):
        with torch.cuda.amp.autocast():
            return model(img)

    output = forward_backward(
        None,
        eval_fwd,
        None,
        inputs,
        num_microbatches=1,
        forward_only=True,
        dtype=torch.float16,
        scatter_gather_tensors=False)

    if tpc.is_last_in_pipeline_group():
        # compute output
        with torch.cuda.amp.autocast():
            loss = criterion(output, target)

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
"""


class Criterion(nn.Module):
    """DeiT's, which is given the inputs too."""

    def forward(self, samples: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
    """In percent, as timm's."""
    best = output.topk(max(topk)).indices == target[:, None]
    return [100 * best[:, :k].any(1).float().mean().item() for k in topk]


def on_these_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide is for CUDA: its autocast is that of the devices at hand."""
    autocast = functools.partial(torch.autocast, device_type())
    monkeypatch.setattr(torch.cuda.amp, "autocast", autocast)
    monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor)


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(textwrap.dedent(code), "guide.py", "exec"), names)


@pytest.mark.filterwarnings("ignore:chunks=1 on 2 devices")  # as the guide evaluates
@pytest.mark.slow
def test_the_guide_runs_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partition, training in bfloat16, clipping, evaluation: on two ranks of one process. Weights
    are those of a plain loop over the same micro-batches, the norm is that of the whole model."""
    torchvision = pytest.importorskip("torchvision")
    on_these_devices(monkeypatch)
    torch.manual_seed(0)
    whole = torchvision.models.resnet18(num_classes=10)
    loader = [(torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))) for _ in range(3)]
    max_norm = 1.0

    def main() -> dict[str, Any]:
        imports = {name: getattr(torchdistpackage, name) for name in torchdistpackage.__all__}
        names: dict[str, Any] = {**imports, "torch": torch, "dist": dist, "__name__": "guide"}
        names |= {"DDP": torchdistpackage.NaiveDDP, "model": copy.deepcopy(whole)}
        names["tpc"].setup_process_groups([("data", 1), ("pipe", 2)], devices=stages(2))
        run(PARTITION, names)
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.01, momentum=0.9)
        names |= {"criterion": Criterion(), "max_norm": max_norm, "data_loader": loader}
        run(TRAIN, names)
        names["model"].eval()
        names |= {"criterion": nn.CrossEntropyLoss(), "device": stages(2)[dist.get_rank()]}
        names["accuracy"] = accuracy
        run(EVALUATE, names)
        return names

    first, last = launch(main, 2)
    twin, optimizer, norm = whole.to(stages(1)[0]), None, None
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    for samples, targets in loader:
        optimizer.zero_grad()
        for x, y in zip(samples.chunk(4), targets.chunk(4), strict=True):
            with torch.autocast(device_type(), dtype=torch.bfloat16):
                out = twin(x.to(stages(1)[0]))
                nn.functional.cross_entropy(out, y.to(out.device)).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        optimizer.step()
    assert_close(first["total_norm"], norm, rtol=1e-4, atol=0.0)
    assert first["total_norm"] is last["total_norm"]
    found = [*first["model"].parameters(), *last["model"].parameters()]
    for p, q in zip(found, twin.parameters(), strict=True):
        assert_close(p, q, rtol=1e-5, atol=1e-6)
    twin.eval()
    with torch.no_grad(), torch.autocast(device_type()):
        expected = twin(loader[-1][0].to(stages(1)[0]))
    assert first["output"] is None
    assert_close(last["output"], expected)
    assert last["acc5"] == accuracy(expected.cpu(), loader[-1][1], (1, 5))[1]
    assert "acc1" not in first
