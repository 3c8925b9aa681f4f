"""Uses that a pipeline is not made for, and what their errors say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import (
    MicrobatchError,
    RecordingError,
    UsageError,
)

from .bad_input import HERE, marked_net, pipeline, train, unchanged, x

# --- what a pipeline is not


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cuda"),
        lambda pipe: pipe.to("meta"),
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.cuda(1),
        lambda pipe: pipe.to_empty(device="meta"),
        lambda pipe: nn.ModuleDict({"pipe": pipe}).to("meta"),
    ],
    ids=["to_cuda", "to_meta", "cuda", "cuda1", "to_empty", "parent"],
)
def test_moving_a_pipeline_is_refused(move: Callable[[bp.Pipeline], Any]) -> None:
    """To another device than its stages', nor by a module around it: a UsageError with the line."""
    net = marked_net()
    pipe = pipeline(net, sample=((x(),), {}))
    with unchanged(net):
        with pytest.raises(UsageError, match=rf"expected no device .*{HERE}.*devices="):
            move(pipe)


def test_changing_the_dtype_is_no_move() -> None:
    """to(dtype) is no move."""
    pipe = pipeline(sample=((x(),), {})).to(torch.float64)
    assert pipe(x().double()).dtype == torch.float64


def test_a_pipeline_in_a_pipelines_forward_is_refused() -> None:
    """A pipeline called in a pipeline's forward is a UsageError with the line, at the recording."""
    outer = nn.Sequential(pipeline(sample=((x(),), {})), nn.Linear(4, 4))
    with unchanged(outer):
        with pytest.raises(UsageError, match=f"inside a forward that Blockpipe runs.*{HERE}"):
            pipeline(outer, devices=["cpu"])(x())


def test_distributed_data_parallel_around_a_pipeline_is_refused() -> None:
    """DistributedDataParallel around a pipeline is a UsageError with the remedy."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"DistributedDataParallel.*ReplicatedPipeline"):
            nn.parallel.DistributedDataParallel(pipeline())
        with pytest.raises(
            UsageError, match=rf"DistributedDataParallel.*{HERE}.*ReplicatedPipeline"
        ):
            nn.parallel.DistributedDataParallel(nn.Sequential(pipeline(), nn.Linear(4, 4)))
        for wrapped in (
            nn.parallel.DistributedDataParallel(nn.Linear(4, 4)),
            nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4))),
        ):
            with pytest.raises(
                UsageError, match=rf"DistributedDataParallel.*{HERE}.*ReplicatedPipeline"
            ):
                bp.Pipeline(wrapped, devices=["cpu"] * 2, chunks=2)
        sharded = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match=rf"is a DTensor.*{HERE}.*ReplicatedPipeline"):
            bp.Pipeline(sharded, devices=["cpu"] * 2, chunks=2)
    finally:
        dist.destroy_process_group()


def test_the_length_of_a_pipeline_is_refused() -> None:
    """It says what may be meant; a pipeline is true all the same."""
    with pytest.raises(UsageError, match=rf"{HERE}\); write len\(pipe\.module\)"):
        len(pipeline())
    assert pipeline()


@pytest.mark.parametrize(
    ("manager", "meant"),
    [
        (lambda pipe: pipe.profile(), r"'events'; write with pipe\.profile\(\) as timeline"),
        (lambda pipe: pipe.measured_memory(), r"write with pipe\.measured_memory\(\) as report"),
    ],
)
def test_a_context_manager_that_is_not_entered_says_so(
    manager: Callable[[bp.Pipeline], Any], meant: str
) -> None:
    found = manager(pipeline())
    with pytest.raises(AttributeError, match=meant):
        found.events  # noqa: B018
    assert "write with pipe." in repr(found)


def test_peft_around_a_pipeline_is_refused() -> None:
    """It would save no adapters; the error says in which order it works."""
    peft = pytest.importorskip("peft")
    pipe = pipeline()
    with unchanged(pipe.module):
        with pytest.raises(UsageError, match=rf"peft around a pipeline.*{HERE}.*pipe\.unplace\(\)"):
            peft.get_peft_model(pipe, peft.LoraConfig(target_modules=["0"]))


def test_peft_around_a_module_that_holds_a_pipeline_is_refused() -> None:
    """By each of peft's functions, before it has changed anything, with the user's line."""
    peft = pytest.importorskip("peft")
    outer, config = (
        nn.Sequential(pipeline(), nn.Linear(4, 4)),
        peft.LoraConfig(target_modules=["0"]),
    )
    for wrap in (
        lambda: peft.get_peft_model(outer, config),
        lambda: peft.get_peft_model(outer, config, mixed=True),
        lambda: peft.PeftModel(outer, config),
        lambda: peft.inject_adapter_in_model(config, outer),
    ):
        with unchanged(outer):
            with pytest.raises(UsageError, match=rf"peft around a pipeline.*{HERE}.*put the pipel"):
                wrap()


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Linear(4, 4)]), nn.Module()], ids=type)
def test_a_model_without_a_forward_is_refused_at_once(model: nn.Module) -> None:
    said = rf"a model with a forward, got {type(model).__name__} without one \(.*{HERE}\); write"
    with pytest.raises(UsageError, match=said):
        bp.Pipeline(model, devices=["cpu"] * 2, chunks=2)


def test_data_parallel_around_a_pipeline_is_refused() -> None:
    with pytest.raises(UsageError, match=rf"the model is a DataParallel.*{HERE}"):
        bp.Pipeline(nn.DataParallel(nn.Linear(4, 4)), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(UsageError, match="DataParallel around a pipeline would copy it"):
        pipeline()._replicate_for_data_parallel()  # as torch.nn.parallel.replicate does


def test_torchs_checkpoint_around_a_pipeline_is_refused() -> None:
    """Before and after the first call; the error names the pipeline's own option."""
    pipe, inputs = pipeline(), x().requires_grad_()
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"{HERE}\); leave it out, and pass checkpoint='alw"):
            checkpoint(pipe, inputs, use_reentrant=False).sum().backward()
        pipe(inputs)
    with torch.no_grad():
        assert checkpoint(pipe, inputs, use_reentrant=False).shape == (8, 4)


def test_asking_a_pipeline_for_its_attributes_raises_nothing() -> None:
    """What looks through an object's attributes (debuggers, mocks) gets no error of DDP's."""
    pipe = pipeline()
    for name in dir(pipe):
        getattr(pipe, name, None)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.func itself
@pytest.mark.parametrize(
    "transform",
    [
        lambda pipe: torch.func.grad(lambda value: pipe(value).sum())(x()),
        lambda pipe: torch.func.vmap(pipe)(x()),
        lambda pipe: torch.func.jvp(pipe, (x(),), (x(),)),
        lambda pipe: torch.func.vjp(pipe, x()),
    ],
    ids=["grad", "vmap", "jvp", "vjp"],
)
def test_torch_func_over_a_pipeline_is_refused(transform: Callable[[bp.Pipeline], Any]) -> None:
    """torch.func over a pipeline is a UsageError with the line."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(UsageError, match=rf"torch\.func.*{HERE}"):
            transform(pipeline(net))


def test_functional_call_with_computed_parameters_is_refused() -> None:
    """functional_call over a pipeline with parameters that have a graph is a UsageError."""
    pipe = pipeline(sample=((x(),), {}))
    weights = {name: p * 2 for name, p in pipe.named_parameters()}
    with pytest.raises(UsageError, match=r"parameters .*'0\.weight'.*functional_call"):
        torch.func.functional_call(pipe, weights, (x(),)).sum().backward()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch itself
def test_forward_mode_through_a_pipeline_is_refused() -> None:
    """Forward-mode AD through a pipeline is a UsageError, not a tangent that is lost."""
    pipe = pipeline(sample=((x(),), {}))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x(), torch.ones(8, 4))
        with pytest.raises(UsageError, match=rf"forward-mode AD.*{HERE}"):
            pipe(dual)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo itself
def test_torch_compile_over_a_pipeline_is_refused() -> None:
    """torch.compile over a pipeline is a UsageError that says to compile module by module."""
    with pytest.raises(UsageError, match=rf"pipe\.compile\(\) compiles the modules.*{HERE}"):
        torch.compile(pipeline(sample=((x(),), {})), backend="eager")(x())


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_is_refused_and_adds_nothing(retain: bool) -> None:
    """A second backward of pipe(x) is a UsageError naming the uncut mode, and adds no gradient."""
    net = marked_net()
    loss = pipeline(net)(x()).sum()
    loss.backward(retain_graph=retain)
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with pytest.raises(UsageError, match=r"already.*'uncut'"):
        loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


def test_create_graph_through_a_pipeline_is_refused() -> None:
    """create_graph=True through pipe(x) is a UsageError naming the uncut mode."""
    net = marked_net()
    with unchanged(net):
        loss = pipeline(net)(x()).sum()
        with pytest.raises(UsageError, match=r"create_graph=True.*'uncut'"):
            loss.backward(create_graph=True)


def test_autograd_grad_of_an_input_is_refused() -> None:
    """autograd.grad through pipe(x) is refused: it would fill every parameter's .grad silently."""
    net = marked_net()
    inputs = x().requires_grad_()
    with unchanged(net):
        loss = pipeline(net)(inputs).sum()
        with pytest.raises(UsageError, match=r"autograd\.grad.*'uncut'"):
            torch.autograd.grad(loss, inputs)


def test_run_before_placement_is_refused() -> None:
    """run() before anything is placed is a UsageError that says what to do first."""
    net = marked_net()
    pipe = pipeline(net)
    with unchanged(net):
        with pytest.raises(UsageError, match=r"run\(\) needs a model that is placed.*pass sample"):
            pipe.run(net.forward, x())


def test_run_of_what_cannot_be_called_is_refused() -> None:
    """run() of something that cannot be called is a UsageError."""
    with pytest.raises(UsageError, match=r"expected a callable for run\(\), got 3 \("):
        pipeline(sample=((x(),), {})).run(3)  # type: ignore[arg-type]


def test_summary_before_the_first_call_asks_for_a_sample() -> None:
    """summary() without a sample before the first call is a UsageError."""
    with pytest.raises(UsageError, match=r"summary\(x\)"):
        pipeline().summary()


def test_devices_before_they_are_known_are_refused() -> None:
    """Without devices= they are not known before the recording: a UsageError."""
    with pytest.raises(UsageError, match="not known before the recording"):
        _ = pipeline(devices=None).devices


def test_a_pipeline_goes_on_after_wrong_use() -> None:
    """After refused calls a pipeline works as if they had not been."""
    net, other = marked_net(), marked_net()
    pipe = pipeline(net)
    for wrong in (torch.ones(8, 5), torch.ones(0, 4)):
        with pytest.raises((RecordingError, MicrobatchError), match="sample"):
            train(pipe, wrong)
    with pytest.raises(MicrobatchError, match="target"):
        pipe.forward_backward(x(), target=torch.ones(3, 4), loss_fn=F.mse_loss)
    train(pipe)
    train(pipeline(other))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
