"""What several processes run together: pipelines against the plain model on the whole batch."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline
from blockpipe.testing import split

from .models import Integers, UNet, gpt, ids, llama, resnet, t5

_TORCH = str(torch.__version__)


def compare(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    target: Any = None,
    loss_fn: Any = None,
    weights: list[float] | None = None,
    steps: int = 1,
    **options: Any,
) -> DistributedPipeline:
    """A step's loss, outputs and gradients are those of the plain loop over the micro-batches."""
    kwargs = kwargs or {}
    plain = copy.deepcopy(model)
    pipe = DistributedPipeline(model, sample=(args, kwargs), **options)
    chunks = options["chunks"]
    parts = split(args, kwargs, target, chunks, options.get("batch_dims"))
    size = sum(part.size for part in parts)
    shares = weights or [part.size / size for part in parts]
    expected, outputs = 0.0, []
    for _ in range(steps):
        expected = 0.0
        for part, share in zip(parts, shares, strict=True):
            output = plain(*part.args, **part.kwargs)
            if not share:
                continue
            loss = output.loss if loss_fn is None else loss_fn(output, part.target)
            (loss * share).backward()
            expected += loss.item() * share
            outputs.append(output)
    for _ in range(steps):
        result = pipe.forward_backward(*args, target=target, loss_fn=loss_fn, **kwargs)
    torch.testing.assert_close(result.loss.item(), expected, rtol=1e-5, atol=1e-6)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        wanted = gradients[name]
        if wanted is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
    return pipe


def mean_square(output: Any, target: Tensor) -> Tensor:
    out = output["out"] if isinstance(output, dict) else output
    return F.mse_loss(out, target)


def deep(stages: int, frozen: int = 0, *, apart: bool = False) -> nn.Module:
    """As many layers as stages; the first ones are frozen, the second stage embeds: apart from what
    it is given, if that is asked for."""
    torch.manual_seed(0)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages))
            self.embedding = nn.Embedding(5, 6)
            for layer in self.layers[:frozen]:
                layer.requires_grad_(False)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            first = x
            for number, layer in enumerate(self.layers):
                with bp.Block(number):
                    x = torch.tanh(layer(x))
                    if number == 1:
                        embedded = self.embedding(index)
                        x = x if apart else x + embedded
            return x + first + embedded if apart else x + first

    return Deep()


def batch_of(size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator)
    index = torch.randint(0, 5, (size,), generator=generator)
    return (x, index), torch.randn(size, 6, generator=generator)


def _schedule(name: str, per_rank: int, frozen: int = 0, *, apart: bool = False) -> Any:
    def case(rank: int, ranks: int) -> None:
        args, target = batch_of(16)
        model = deep(ranks * per_rank, frozen, apart=apart)
        compare(model, args, target=target, loss_fn=mean_square, chunks=8, schedule=name)

    return case


SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "looped-bfs": 2,
    "interleaved": 2,
    "zb-h1": 2,
    "zb-v": 2,
    "dualpipe-v": 2,
}
for _name, _per_rank in SCHEDULES.items():
    for _frozen in (0, 1):
        _title = f"schedule_{_name.replace('-', '_')}_frozen_{_frozen}"
        globals()[_title] = _schedule(_name, _per_rank, _frozen)


for _name in ("zb-h1", "zb-v", "dualpipe-v"):
    _title = f"schedule_{_name.replace('-', '_')}_embeds_apart"
    globals()[_title] = _schedule(_name, 2, apart=True)


def uneven(rank: int, ranks: int) -> None:
    args, target = batch_of(15)
    compare(deep(ranks), args, target=target, loss_fn=mean_square, chunks=4)


def two_steps(rank: int, ranks: int) -> None:
    args, target = batch_of(8)
    compare(deep(ranks), args, target=target, loss_fn=mean_square, chunks=4, steps=2)


def weighed(rank: int, ranks: int) -> None:
    """One micro-batch counts for nothing, and its loss is no number."""

    def count(args: Any, kwargs: Any, target: Tensor) -> float:
        return float((target[:, 0] == target[:, 0]).sum())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        is_counted = target[:, 0] == target[:, 0]
        return (output - target)[is_counted].square().mean()

    args, target = batch_of(8)
    target[2:4] = torch.nan
    target[4] = torch.nan
    shares = [2 / 5, 0.0, 1 / 5, 2 / 5]
    options: dict[str, Any] = {"chunks": 4, "loss_reduction": count}
    compare(deep(ranks), args, target=target, loss_fn=loss, weights=shares, **options)


def _on(ranks: int) -> dict[str, Any]:
    """Options for the models of four stages."""
    return {"chunks": 4, "schedule": "1f1b" if ranks == 4 else "interleaved"}


def unet(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 8, 8), torch.randn(8, 3, 8, 8)
    compare(UNet(), (x,), target=y, loss_fn=mean_square, **_on(ranks))


def integers(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = Integers()
    x, y, index = torch.randn(8, 4), torch.randn(8, 8), torch.randint(0, 10, (8,))
    compare(model, (x,), {"index": index}, target=y, loss_fn=mean_square, **_on(ranks))


def residual(rank: int, ranks: int) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    compare(resnet(), (x,), target=y, loss_fn=F.cross_entropy, **_on(ranks))


def tied_gpt(rank: int, ranks: int) -> None:
    """Its tied weight is on two processes, or twice on one."""
    given = {"input_ids": ids(8), "labels": ids(8)}
    compare(gpt(), (), given, steps=2, **_on(ranks))


def tied_gpt_zero_bubble(rank: int, ranks: int) -> None:
    given = {"input_ids": ids(8), "labels": ids(8)}
    if ranks == 2:
        compare(gpt(), (), given, chunks=4, schedule="zb-v")


def rotary_llama(rank: int, ranks: int) -> None:
    mask = torch.ones(8, 8, dtype=torch.long)
    given = {"input_ids": ids(8), "labels": ids(8), "attention_mask": mask}
    compare(llama(), (), given, **_on(ranks))


def encoder_decoder(rank: int, ranks: int) -> None:
    compare(t5(), (), {"input_ids": ids(8), "labels": ids(8)}, **_on(ranks))


class TiedLayers(nn.Module):
    """A layer for each stage, and one that some of the stages share."""

    def __init__(self, stages: int, sharing: set[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages))
        self.shared = nn.Linear(6, 6)
        self.sharing = sharing

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with bp.Block(number):
                x = torch.tanh(layer(x))
                if number in self.sharing:
                    x = self.shared(x)
        return x


def other_processes_share_in_the_next_model(rank: int, ranks: int) -> None:
    """A process that shares nothing with the others in one model does so in another one."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    for sharing in ({0, ranks - 1}, {*range(ranks)}, {1, ranks - 1}):
        model = TiedLayers(ranks, sharing)
        compare(model, (x,), target=y, loss_fn=mean_square, chunks=4, steps=2)


def values_of_one_process_count(rank: int, ranks: int) -> None:
    """A tied weight that differs at the start is the first stage's."""
    model = gpt()
    if rank:
        with torch.no_grad():
            model.lm_head.weight.mul_(3)
    pipe = DistributedPipeline(
        model, sample=((), {"input_ids": ids(8), "labels": ids(8)}), **_on(ranks)
    )
    state = pipe.state_dict()
    expected = gpt().state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


def state_goes_both_ways(rank: int, ranks: int) -> None:
    """A gathered state dict is the plain model's, and is loaded stage by stage."""
    model = deep(ranks)
    args, _ = batch_of(8)
    expected = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    pipe = DistributedPipeline(model, sample=args, chunks=4)
    pipe.load_state_dict(expected)
    found = pipe.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain = deep(ranks)
    plain.load_state_dict(found)
    with torch.no_grad():
        torch.testing.assert_close(pipe(*args), plain(*args))
        pipe.eval()
        torch.testing.assert_close(pipe(*args), plain.eval()(*args))
        try:
            pipe.load_state_dict({"no": torch.zeros(())})
        except bp.BlockpipeError as error:
            assert "expected a checkpoint of Deep" in str(error)
        else:
            raise AssertionError("not refused")


def outputs_where_they_are_asked_for(rank: int, ranks: int) -> None:
    """The loss is everywhere."""
    model = deep(ranks)
    plain = copy.deepcopy(model)
    args, target = batch_of(10)
    pipe = DistributedPipeline(model, sample=args, chunks=4)
    result = pipe.forward_backward(
        *args, target=target, loss_fn=mean_square, return_outputs=rank == 0
    )
    if rank == 0:
        torch.testing.assert_close(result.outputs, plain(*args))
    else:
        assert result.outputs is None
    expected = mean_square(plain(*args), target).detach()
    torch.testing.assert_close(result.loss.item(), expected.item())


def clipped(rank: int, ranks: int) -> None:
    """The norm counts a tied weight once."""
    for norm_type in (2.0, float("inf")):
        model = gpt()
        plain = copy.deepcopy(model)
        given = {"input_ids": ids(8), "labels": ids(8)}
        pipe = DistributedPipeline(model, sample=((), given), **_on(ranks))
        pipe.forward_backward(**given)
        plain(**given).loss.backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        torch.testing.assert_close(pipe.clip_grad_norm_(0.1, norm_type), expected)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7)


def replicas_of_a_pipeline(rank: int, ranks: int) -> None:
    """Two replicas with uneven shares are one process with the whole batch; also a second step."""
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    model = deep(ranks // 2)
    if ranks == 2:
        model.embedding.requires_grad_(False)  # the second stage's
    plain = copy.deepcopy(model)
    args, target = batch_of(10)
    replica = rank // (ranks // 2)
    if replica:
        with torch.no_grad():
            model.layers[0].weight.add_(1)  # it gets the first replica's value
    share = slice(0, 6) if replica == 0 else slice(6, 10)
    own = tuple(a[share] for a in args)
    pipe = DistributedPipeline(model, sample=own, mesh=mesh, chunks=2)
    for _ in range(2):
        found = pipe.forward_backward(*own, target=target[share], loss_fn=mean_square).loss
        loss = mean_square(plain(*args), target)
        loss.backward()
        torch.testing.assert_close(found.item(), loss.item())
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        if gradients[name] is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def a_stage_is_summed_over_replicas_while_others_run(rank: int, ranks: int) -> None:
    """The last one first; with several stages a process, a tied weight waits for all of its own."""
    mesh = init_device_mesh("cpu", (ranks, 1))
    for schedule in ("looped-bfs", "zb-v", "interleaved"):
        model = TiedLayers(2, {0, 1})
        plain = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(2, 5 * ranks, 6, generator=generator)
        own = slice(5 * rank, 5 * rank + 5)
        pipe = DistributedPipeline(model, sample=x[own], mesh=mesh, chunks=2, schedule=schedule)
        for _ in range(2):
            pipe.forward_backward(x[own], target=y[own], loss_fn=mean_square)
            mean_square(plain(x), y).backward()
            sums = pipe._gradients.sums
            assert sums is not None
            assert [stages for stages, _ in sums.order] == [(1,), (0,), (0, 1)], schedule
            assert [before for _, before in sums.order] == [True, False, False], schedule
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def classes_weigh_as_in_the_whole_batch(rank: int, ranks: int) -> None:
    """CrossEntropyLoss(weight=…) divides by the weights of the targets, in replicas as well."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=generator), torch.tensor([0, 0, 0, 1, 2, 2, 1, 2])
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2, 1.0, 1.0, 1.0]))
    shares = [2.0, 4.0, 0.4, 3.2]
    whole = [share / sum(shares) for share in shares]
    model = TiedLayers(ranks, set())
    compare(model, (x,), target=y, loss_fn=loss_fn, weights=whole, chunks=4)
    model, mesh = TiedLayers(ranks // 2, set()), init_device_mesh("cpu", (2, ranks // 2))
    plain = copy.deepcopy(model)
    own = slice(0, 5) if rank < ranks // 2 else slice(5, 8)
    pipe = DistributedPipeline(model, sample=x[own], mesh=mesh, chunks=2)
    found = pipe.forward_backward(x[own], target=y[own], loss_fn=loss_fn).loss
    loss = loss_fn(plain(x), y)
    loss.backward()
    torch.testing.assert_close(found.item(), loss.item())
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


class OwnLoss(nn.Module):
    """Returns its loss, a mean over the rows that count."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages))

    def forward(self, x: Tensor, counts: Tensor) -> dict[str, Tensor]:
        for number, layer in enumerate(self.layers):
            with bp.Block(number):
                x = layer(x).tanh()
        return {"loss": (x.square().mean(1) * counts).sum() / counts.sum(), "x": x}


def arguments_of_the_first_process_weigh_the_models_own_loss(rank: int, ranks: int) -> None:
    """The others need no values of them."""
    torch.manual_seed(0)
    model, x = OwnLoss(ranks), torch.randn(8, 6)
    counts = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    plain = copy.deepcopy(model)
    wanted = plain(x, counts)["loss"]
    wanted.backward()
    pipe = DistributedPipeline(
        model, sample=(x, counts), chunks=4, loss_reduction=lambda args, _, target: args[1].sum()
    )
    given = (x, counts) if rank == 0 else (torch.zeros(8, 6), torch.ones(8))
    result = pipe.forward_backward(*given, return_outputs=True)
    torch.testing.assert_close(result.loss.item(), wanted.item())
    torch.testing.assert_close(result.outputs["loss"].item(), wanted.item())
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def what_one_process_alone_changes_leaves_no_process_waiting(rank: int, ranks: int) -> None:
    """A hook has the model recorded anew in one process; the others go on with what they have."""
    args, target = batch_of(16)
    net = deep(ranks)
    plain = copy.deepcopy(net)
    pipe = DistributedPipeline(net, sample=args, chunks=8)
    handles: list[Any] = []
    for is_hooked in (False, True, False, True):
        if rank == ranks - 1 and is_hooked:
            handles.append(net.layers[-1].register_forward_hook(_looks))
        while handles and not is_hooked:
            handles.pop().remove()
        for size in (16, 15, 16):  # a second engine, for the rest
            some, wanted = tuple(tensor[:size] for tensor in args), target[:size]
            found = pipe.forward_backward(*some, target=wanted, loss_fn=mean_square)
            loss = mean_square(plain(*some), wanted)
            loss.backward()
            torch.testing.assert_close(found.loss, loss.detach())
            with torch.no_grad():
                torch.testing.assert_close(pipe(*some), plain(*some))
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def _looks(module: nn.Module, args: Any, output: Tensor) -> None:
    assert output.shape[-1] == 6
