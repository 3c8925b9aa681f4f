"""What people type first, each with the words of the error that says what was meant.

One row for each try that users were seen to make, and for those like it. Other libraries' names are in
``test_first_tries_by_door``.
"""

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import DeviceError, MarkError, PlanError, UsageError
from blockpipe.replicas import Replicas

from ..models import linears, square
from ..stage_devices import assert_close, is_simulated, stages

X = torch.ones(4, 4)


class Generator(nn.Module):
    """Has what a language model has beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.config = {"width": 4}

    def generate(self, x: Tensor) -> Tensor:
        return self(x)

    def save_pretrained(self, folder: str) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class OwnLoss(nn.Module):
    """Has arguments with the names of a step's, and of the reports'."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), bp.BeginBlock(nn.Linear(4, 4), stage=1)

    def forward(
        self, x: Tensor, target: Tensor | None = None, *, limit: float = 1.0, path: float = 1.0
    ) -> Any:
        out = self.b(self.a(x)) * limit * path
        return out if target is None else (F.mse_loss(out, target), out)


def pipeline(model: nn.Module | None = None, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(model or linears(2), **{"devices": stages(2), "chunks": 2, **options})


def step(*args: Any, **kwargs: Any) -> bp.StepResult:
    return pipeline().forward_backward(*(args or (X,)), **kwargs)


def loss() -> Tensor:
    return step(loss_fn=square).loss


def assign(**options: Any) -> None:
    pipe = pipeline()
    for name, value in options.items():
        setattr(pipe, name, value)


# By what is typed: what it does, and words of the error.
TRIES: dict[str, tuple[Callable[[], Any], str]] = {
    # After a step
    "result.loss.backward()": (lambda: loss().backward(), "has run the backward already: remove"),
    "(result.loss / 4).backward()": (lambda: (loss() / 4).backward(), "has run the backward alr"),
    "scaler.scale(loss).backward()": (
        lambda: torch.amp.GradScaler("cpu").scale(loss()).backward(),
        "has run the backward already: remove this call",
    ),
    "result.backward()": (lambda: step(loss_fn=square).backward, "has run the backward already"),
    "result.item()": (lambda: step(loss_fn=square).item, "the loss has it: result.loss.item"),
    "result.output": (lambda: step(loss_fn=square).output, "did you mean 'outputs'?"),
    # What the model has
    "pipe.config": (lambda: pipeline(Generator()).config, "the model has it: pipe.module.config"),
    "pipe.fc": (lambda: pipeline(Generator()).fc, "the model has it: pipe.module.fc"),
    "pipe.generate()": (lambda: pipeline(Generator()).generate, "pipe.run(pipe.module.generate"),
    "pipe.save_pretrained()": (
        lambda: pipeline(Generator()).save_pretrained,
        "pipe.module.save_pretrained(…) where it does not",
    ),
    "SGD(pipe)": (lambda: torch.optim.SGD(pipeline()), "or pipe.parameters() for an optimizer"),
    "pipe[0]": (lambda: pipeline()[0], "write pipe.module[0]"),
    # What a pipeline has under another name
    "pipe.backward()": (lambda: pipeline().backward, "forward_backward(…) runs it"),
    "pipe.step()": (lambda: pipeline().step, "and then step() of the optimizer"),
    "pipe.train_batch()": (lambda: pipeline().train_batch, "call forward_backward(…), and then"),
    "pipe.fit()": (lambda: pipeline().fit, "write the loop: forward_backward(…), and then"),
    "pipe.predict()": (lambda: pipeline().predict, "call the pipeline under torch.no_grad()"),
    "pipe.save_checkpoint()": (lambda: pipeline().save_checkpoint, "torch.save(pipe.state_dict()"),
    "pipe.num_stages": (lambda: pipeline().num_stages, "pipe.plan.num_stages"),
    "pipe.loss": (lambda: pipeline().loss, "result.loss"),
    "pipe.device": (lambda: pipeline().device, "pipe.devices, pipe.input_device"),
    "pipe.forward_backwards()": (
        lambda: pipeline().forward_backwards,
        "did you mean 'forward_backward'?",
    ),
    # Options
    "Block(ipu_id=)": (lambda: bp.Block(ipu_id=1), "pass stage=; devices= of Pipeline"),
    "Block('encoder')": (lambda: bp.Block("encoder"), "and name='encoder' for a name"),
    "BeginBlock(m, 'B1', ipu_id=)": (
        lambda: bp.BeginBlock(nn.Linear(4, 4), "B1", ipu_id=1),
        "pass stage=; devices= of Pipeline",
    ),
    "BeginBlock(m, 1, 'B1')": (
        lambda: bp.BeginBlock(nn.Linear(4, 4), 1, "B1"),
        "takes (module, stage) by position, and got more arguments",
    ),
    "Pipeline(m, balance=)": (lambda: pipeline(balance=[1, 1]), "mark_sequential(net, sizes)"),
    "Pipeline(m, ['cuda:0'], 4)": (
        lambda: bp.Pipeline(linears(2), ["cpu"], 4),
        "pass the others by name: devices=…, chunks=…",
    ),
    "Pipeline(m, device=)": (lambda: pipeline(device="cpu"), "pass devices=, one for each stage"),
    "Pipeline(m, device_map=)": (lambda: pipeline(device_map="auto"), "call blockpipe.from_device"),
    "Pipeline(m, microbatches=)": (lambda: pipeline(microbatches=4), "pass chunks="),
    "Pipeline(m, num_microbatch=)": (lambda: pipeline(num_microbatch=4), "pass chunks="),
    "Pipeline(m, micro_batch_size=)": (lambda: pipeline(micro_batch_size=4), "pass chunks= for the"),
    "Pipeline(m, dtype=)": (lambda: pipeline(dtype=torch.bfloat16), "model.to(dtype), or torch.aut"),
    "Pipeline(m, recompute=)": (lambda: pipeline(recompute=True), "pass checkpoint="),
    "Pipeline(m, num_stages=)": (lambda: pipeline(num_stages=4), "plan=balance(model, args, stag"),
    "Pipeline(m, optimizer=)": (lambda: pipeline(optimizer=None), "step() after forward_backward"),
    "Pipeline(m, loss_fn=)": (lambda: pipeline(loss_fn=square), "pass it to forward_backward(…"),
    "Pipeline(m, chunk=)": (lambda: pipeline(chunk=4), "did you mean 'chunks'"),
    "Pipeline(m, checkpointing=)": (lambda: pipeline(checkpointing=4), "did you mean 'checkpoint'"),
    "Pipeline(m, devices='cuda')": (lambda: pipeline(devices="cuda"), "or devices='auto' for all"),
    "Pipeline(m, plan='layer3=1')": (lambda: pipeline(plan="1=1"), "StagePlan.from_layout('layer3"),
    "Pipeline(m, plan={'layer3': 1})": (lambda: pipeline(plan={"1": 1}), "begin_blocks(model, {"),
    "pipe.chunk = 8": (lambda: assign(chunk=8), "no option 'chunk'"),
    "pipe.schedules = 'gpipe'": (lambda: assign(schedules="gpipe"), "did you mean 'schedule'?"),
    "balance(m, x, num_stages=2)": (
        lambda: bp.balance(linears(2), X, num_stages=2),  # type: ignore[call-arg]
        "pass stages=",
    ),
    "record(m, sample=x)": (lambda: bp.record(linears(2), sample=X), "pass args=, the forward's"),  # type: ignore[call-arg]
    # A step's arguments
    "forward_backward(x, y, loss_fn=)": (lambda: step(X, X, loss_fn=F.mse_loss), "by name: target=…"),
    "forward_backward(x, labels=y)": (lambda: step(X, labels=X, loss_fn=F.mse_loss), "name: target=…"),
    "forward_backward(x, criterion=)": (lambda: step(X, criterion=square), "as loss_fn=…"),
    "forward_backward(x, target=y, criterion=)": (
        lambda: step(X, target=X, criterion=F.mse_loss),
        "pass loss_fn= in the place of criterion=",
    ),
    "forward_backward(x, loss_fn=)": (
        lambda: step(X, loss_fn=nn.MSELoss()),
        "expected a target for a loss_fn that takes two arguments",
    ),
    "forward_backward(x, target=y)": (lambda: step(X, target=X), "model_kwargs={'target': …}"),
    "forward_backward(…, return_output=)": (
        lambda: step(X, loss_fn=square, return_output=True),
        "did you mean 'return_outputs'?",
    ),
    "forward_backward(…, model_kwargs=[])": (
        lambda: step(X, loss_fn=square, model_kwargs=[1]),
        "write model_kwargs={'target': …}",
    ),
    "loss_fn=nn.CrossEntropyLoss": (
        lambda: step(X, target=X, loss_fn=nn.CrossEntropyLoss),
        "loss_fn=CrossEntropyLoss()",
    ),
    "no loss": (lambda: step(X), "pass a loss_fn= that reduces to one number"),
    # Samples
    "pipe.summary((8, 16))": (lambda: pipeline().summary((8, 16)), "torch.zeros(8, 16)"),
    "pipe.summary(input_size=)": (
        lambda: pipeline().summary(input_size=(8, 16)),
        "pass tensors, not their shapes",
    ),
    "pipe.summary(x, dept=2)": (lambda: pipeline().summary(X, dept=2), "did you mean 'depth'?"),
    # Devices
    "pipe.to('cuda:7')": (lambda: pipeline().to("cuda:7"), "see 'Devices' in docs/how-to/training"),
    "pipe.cuda()": (lambda: pipeline().cuda(), "leave the call out, pass devices=[…]"),
    "pipe.to('meta')": (lambda: pipeline().to("meta"), "leave the call out, pass devices=[…]"),
    # Names of the package
    "bp.make_schedule": (lambda: bp.make_schedule, "from blockpipe.schedules import make_schedule"),
    "bp.testing.dry_run": (lambda: bp.dry_run, "from blockpipe.testing import dry_run"),
    "bp.MarkError": (lambda: bp.MarkError, "from blockpipe.errors import MarkError"),
    "bp.Replicas": (lambda: bp.Replicas, "from blockpipe.replicas import Replicas"),
    "bp.GPipe": (lambda: bp.GPipe, "from blockpipe.compat.torchgpipe import GPipe"),
    "bp.verify": (lambda: bp.verify, "Pipeline(…).verify(…)"),
    "bp.begin_block": (lambda: bp.begin_block, "did you mean 'begin_blocks'?"),
}  # fmt: skip


@pytest.mark.parametrize("typed", TRIES)
def test_a_first_try_names_what_was_meant(typed: str) -> None:
    """Each row of the table."""
    call, words = TRIES[typed]
    with pytest.raises(Exception, match=re.escape(words)):
        call()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_a_sum_is_noticed(reduction: str) -> None:
    """Its micro-batches' losses are added up, and not averaged, by loss_reduction="sum"."""
    pipe, loss_fn = pipeline(loss_reduction=reduction), nn.MSELoss(reduction="sum")
    if reduction == "sum":
        found = pipe.forward_backward(X, target=-X, loss_fn=loss_fn).loss
        assert_close(found.cpu(), loss_fn(pipe.unplace()(X.clone()), -X).detach())
        return
    with pytest.warns(UserWarning, match=r"reduction='sum', .*test_first_tries.*; pass loss_redu"):
        pipe.forward_backward(X, target=-X, loss_fn=loss_fn)


def test_a_number_of_the_whole_batch_is_refused_in_a_mean() -> None:
    """Hugging Face's plain trainer passes it: each micro-batch's loss would be divided by it."""

    class Counted(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
            return (super().forward(x) - labels).square().sum() / num_items_in_batch

    model, call = Counted(4, 4), {"labels": -X, "num_items_in_batch": 4}
    whole = model(X, **call)
    for count in (4, torch.tensor(4)):
        with pytest.raises(UsageError, match="got num_items_in_batch.* use .*PipelineTrainer"):
            bp.Pipeline(model, chunks=2)(X, labels=-X, num_items_in_batch=count)
    with pytest.raises(UsageError, match="or pass loss_reduction='sum' to Pipeline"):
        bp.Pipeline(model, chunks=2).forward_backward(X, **call)
    found = bp.Pipeline(model, chunks=2, loss_reduction="sum")(X, **call)
    assert_close(found.cpu(), whole)


def test_a_path_from_further_inside_is_found() -> None:
    """As the user's code of an inner module has it."""
    net = nn.ModuleDict({"transformer": nn.ModuleDict({"h": linears(3)})})
    with pytest.raises(MarkError, match=r"got 'h\.1' .*; did you mean 'transformer\.h\.1'\?"):
        bp.begin_blocks(net, {"h.1": 1})


# --- what means something, and does it


def test_a_number_of_devices_is_so_many() -> None:
    """Accelerators in order; without any, so many stages on the CPU."""
    assert pipeline(devices=2).devices == pipeline(devices=stages(2)).devices
    assert bp.balance(linears(2), X, 2, by="parameters", devices=2).num_stages == 2


def test_auto_is_all_devices_as_none_is() -> None:
    """The CPU for each stage on a machine without accelerators."""
    found, other = pipeline(devices="auto"), pipeline(devices=None)
    found(X), other(X)
    assert found.devices == other.devices


@pytest.mark.parametrize("devices", [0, -1, True, 2.0])
def test_what_is_no_number_of_devices_is_an_error(devices: Any) -> None:
    with pytest.raises(PlanError, match="expected a list with one device for each stage"):
        pipeline(devices=devices)


def test_more_devices_than_there_are_is_an_error() -> None:
    """Which says how to put several stages on a device; the CPU has room for any number."""
    if not is_simulated():
        assert len(pipeline(devices=99).devices) == 99
        return
    with pytest.raises(
        DeviceError, match=r"at most \d+, .*got 99 .*devices=\['simulated:0'\] \* 99"
    ):
        pipeline(devices=99)


def test_arguments_of_the_model_may_have_the_names_of_a_steps() -> None:
    """model_kwargs passes them, in steps and reports."""
    model, y = OwnLoss(), torch.zeros(4, 4)
    wanted = {"target": y, "limit": 2.0, "path": 3.0}
    expected = model(X, **wanted)[0].detach()
    pipe = pipeline(model)
    assert_close(pipe.forward_backward(X, model_kwargs=wanted).loss, expected)
    assert_close(pipe(X, **wanted)[0].detach(), expected)
    assert pipe.verify(X, model_kwargs=wanted)
    assert pipe.find_chunks(X, model_kwargs=wanted, repeats=1, candidates=[2])
    assert pipe.memory(X, model_kwargs=wanted).stages
    assert pipe.summary(X, model_kwargs=wanted).parameters == 40
    assert pipe.explain("b", X, model_kwargs=wanted).startswith("b (Linear) is on stage 1")


def test_an_argument_of_the_model_beside_a_target() -> None:
    """The loss has its own."""
    model = OwnLoss()
    found = pipeline(model).forward_backward(
        X,
        target=X,
        loss_fn=lambda output, target: output[0] + F.l1_loss(output[1], target),
        model_kwargs={"target": X * 2},
    )
    own, out = model(X.to(model.a.weight.device), X * 2) if not is_simulated() else (None, None)
    if out is not None:
        assert_close(found.loss, (own + F.l1_loss(out, X)).detach())


def test_copies_take_the_models_arguments_too() -> None:
    """Replicas hands them on."""
    model = OwnLoss()
    expected = F.mse_loss(model(X), X * 2).detach()
    copies = Replicas(model, [stages(2)] * 2, chunks=2)
    assert_close(copies.forward_backward(X, model_kwargs={"target": X * 2}).loss, expected)


def test_an_argument_that_is_given_twice_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"once, got \['x'\] both by name and in model_kwargs"):
        pipeline(OwnLoss()).forward_backward(x=X, model_kwargs={"x": X})


def test_a_new_attribute_of_a_pipeline_is_no_slip() -> None:
    """Only names like an option's are."""
    pipe = pipeline()
    pipe.note = "mine"
    pipe.extra = nn.Linear(1, 1)
    assert pipe.note == "mine"
    assert pipe.extra.in_features == 1


# --- what other libraries do with a module


def test_the_device_of_all_stages_is_no_move() -> None:
    """Frameworks call .to() of everything; a dtype beside the device counts."""
    device = stages(1)[0]
    pipe = pipeline(devices=[device, device])
    before = [p.device for p in pipe.parameters()]
    assert pipe.to(device) is pipe
    assert pipe.to(torch.ones(1, device=device)) is pipe
    assert pipe.to(torch.device(device), non_blocking=True) is pipe
    assert [p.device for p in pipe.parameters()] == before
    pipe.to(device, torch.float64)
    assert {p.dtype for p in pipe.parameters()} == {torch.float64}
    assert pipe.half() is pipe
    assert {p.dtype for p in pipe.parameters()} == {torch.float16}


def test_a_device_that_is_not_that_of_all_stages_is_refused() -> None:
    """With the line that asked for it, and the stages' devices."""
    where = rf"got 'meta' \(\S*test_first_tries\.py:\d+\): its stages are on {stages(1)[0]}"
    with pytest.raises(UsageError, match=where):
        pipeline().to("meta")
    if is_simulated():
        with pytest.raises(
            UsageError, match=r"got 'simulated:0' .* on simulated:0, simulated:1, and"
        ):
            pipeline().to("simulated:0")
        pipe = pipeline()
        pipe(X)
        for module in (pipe, nn.Sequential(pipe)):
            with pytest.raises(UsageError, match="got 'cpu'"):
                module.cpu()


def test_the_signature_of_a_pipelines_forward_is_the_models() -> None:
    """Also of a copy; the class has its own."""
    pipe = pipeline(OwnLoss())
    expected = inspect.signature(pipe.module.forward)
    assert list(expected.parameters) == ["x", "target", "limit", "path"]
    assert inspect.signature(pipe.forward) == expected
    assert inspect.signature(copy.deepcopy(pipe).forward) == expected
    assert list(inspect.signature(bp.Pipeline.forward).parameters) == ["self", "args", "kwargs"]
    assert pipe.forward.__self__ is pipe
    assert_close(pipe.forward.__func__(pipe, X).detach(), pipe.forward(X).detach())


def test_what_shards_a_pipeline_is_refused_with_the_lines_to_write() -> None:
    """Before it has changed anything."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    lines = r"\n    pipe = blockpipe.distributed.ReplicatedPipeline(.|\n)*optimizer.step\(\)"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for wrap, name in (
            (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
            (lambda pipe: FullyShardedDataParallel(pipe, device_id=torch.device("cpu")), "FullySh"),
            (lambda pipe: fully_shard(pipe, mesh=mesh), "fully_shard"),
        ):
            pipe = pipeline(devices=["cpu"] * 2)
            parameters = list(pipe.parameters())
            with pytest.raises(UsageError, match=rf"{name}(.|\n)*test_first_tries(.|\n)*{lines}"):
                wrap(pipe)
            assert type(pipe) is bp.Pipeline
            assert all(p is q for p, q in zip(pipe.parameters(), parameters, strict=True))
    finally:
        dist.destroy_process_group()


def test_data_parallel_names_copies_of_a_pipeline() -> None:
    """It asks for the parameters first, and would say that they are on a wrong device."""
    wrapped = nn.DataParallel(pipeline())
    wrapped.device_ids = [0, 1]  # as where there are several
    with pytest.raises(UsageError, match=r"DataParallel around .*Replicas\(model, \[\['cuda:0'"):
        wrapped(X)
