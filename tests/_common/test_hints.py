"""What people type who come from elsewhere: the error says what it is called here."""

import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import CrossingError, PlanError, UsageError

from ..models import linears

HERE = r"test_hints\.py:\d+"
X = torch.ones(4, 4)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.config = {"width": 4}

    @property
    def costly(self) -> int:
        raise RuntimeError("evaluated")

    def generate(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def pipeline(model: nn.Module | None = None, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(model or linears(2), **{"devices": ["cpu"] * 2, "chunks": 2, **options})


def step(**options: Any) -> bp.StepResult:
    options = {"loss_fn": torch.sum, **options}
    return pipeline().forward_backward(X, **options)


# --- a step's result


def test_the_backward_of_a_result_has_been_done() -> None:
    """Plain loops call it; a result has none."""
    result = step()
    assert not hasattr(result, "backward")
    with pytest.raises(AttributeError, match="has run the backward already: remove this call"):
        result.backward  # noqa: B018
    with pytest.raises(UsageError, match=rf"the backward already: .*{HERE}\); scale a loss in"):
        result.loss.backward()


def test_a_loss_is_a_plain_tensor_otherwise() -> None:
    """In what is printed, computed, copied and saved."""
    loss = step().loss
    plain = torch.tensor(loss.item())
    assert f"{loss:.3f}" == f"{plain:.3f}"
    assert repr(loss) == repr(plain)
    assert type(loss + 2) is type(loss.detach()) is type(copy.deepcopy(loss)) is Tensor
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["loss"], plain)


def test_what_is_added_to_a_loss_in_place_has_a_backward() -> None:
    """A penalty of the caller's own."""
    weight = torch.ones((), requires_grad=True)
    loss = step().loss
    loss += 3 * weight
    loss.backward()
    assert weight.grad == 3


# --- what the model has


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("config", "the model has it: pipe.module.config"),
        ("fc", "the model has it: pipe.module.fc"),
        ("costly", "the model has it: pipe.module.costly"),
        ("generate", "pipe.run(pipe.module.generate, …)"),
    ],
)
def test_an_attribute_of_the_model_is_asked_of_pipe_module(name: str, hint: str) -> None:
    """The error says so; nothing of the model is evaluated."""
    pipe = pipeline(Named())
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; .*") as found:
        getattr(pipe, name)
    assert hint in str(found.value)


def test_an_attribute_that_nobody_has_gets_no_hint() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        pipeline().nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute '_private'$"):
        pipeline()._private  # noqa: B018


def test_an_item_of_a_pipeline_is_asked_of_pipe_module() -> None:
    """The error says how to write that."""
    with pytest.raises(UsageError, match=rf"{HERE}\); write pipe\.module\[0\]"):
        pipeline()[0]


# --- arguments


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bp.Block(ipu_id=1), r"Block\(\) got .* 'ipu_id' \(.*\); pass stage="),
        (lambda: bp.BlockFunction(ipu_id=1), r"BlockFunction\(\) got .*; pass stage="),
        (lambda: bp.BeginBlock(Named(), "B1", ipu_id=1), r"BeginBlock\(\) got .*; pass stage="),
        (lambda: pipeline(balance=[1, 1]), r"Pipeline\(\) got .*mark_sequential\(net, sizes\)"),
        (lambda: pipeline(n_microbatches=4), "pass chunks="),
        (lambda: step(loss_fn=nn.MSELoss), r"an instance of the class: loss_fn=MSELoss\(\)"),
    ],
)
def test_arguments_of_other_libraries_are_named_as_here(
    call: Callable[[], Any], match: str
) -> None:
    """An error that is a TypeError still."""
    with pytest.raises(UsageError, match=match) as found:
        call()
    assert isinstance(found.value, TypeError)


def test_names_of_other_libraries_are_in_no_signature() -> None:
    """Other names are understood, and not accepted."""
    assert list(inspect.signature(bp.Block).parameters) == ["stage", "name", "checkpoint"]
    assert "balance" not in inspect.signature(bp.Pipeline).parameters


def test_a_plan_given_for_sizes_says_to_pass_it_as_plan() -> None:
    """Its table is not put into the error."""
    plan = bp.balance(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), X, 2, by="parameters")
    with pytest.raises(PlanError, match=r"got BalancedPlan .*Pipeline\(net, plan=plan\)"):
        bp.mark_sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan)


@pytest.mark.parametrize("is_there", [False, True])
def test_weights_are_saved_to_a_directory(tmp_path: Path, is_there: bool) -> None:
    """A path that looks like a file's is refused, whether something is there or not."""
    path = tmp_path / "model.safetensors"
    if is_there:
        path.touch()
    with pytest.raises(UsageError, match="expected a directory"):
        pipeline().save_weights(path)
    assert path.exists() == is_there


# --- names


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MarkError", "from blockpipe.errors import MarkError"),
        ("make_schedule", "from blockpipe.schedules import make_schedule"),
        ("nothing", "no attribute 'nothing'"),
    ],
)
def test_names_of_submodules_say_where_to_import_them_from(name: str, hint: str) -> None:
    """Where to import them from."""
    assert not hasattr(bp, name)
    with pytest.raises(AttributeError, match=f"{hint}$"):
        getattr(bp, name)


def test_pipeline_stage_is_another_name_of_a_stage() -> None:
    """It can be read and set; a name that is none is an error."""
    entry = bp.get_pipeline_stage_assignment(linears(2), X)[1]
    assert entry.pipeline_stage == 1
    entry.pipeline_stage = 2
    assert entry.stage == 2
    with pytest.raises(AttributeError, match="stag"):
        entry.stag = 1  # type: ignore[attr-defined]


# --- what would treat a pipeline as one module


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize(
    ("capture", "name"),
    [
        (torch.jit.script, "torch.jit.script"),
        (lambda pipe: torch.jit.trace(pipe, X), "torch.jit.trace"),
        (lambda pipe: torch.export.export(pipe, (X,)), "torch.export"),
    ],
)
def test_a_pipeline_cannot_be_captured(capture: Callable[[bp.Pipeline], Any], name: str) -> None:
    """The error says to unplace it and to capture the model."""
    with pytest.raises(UsageError, match=rf"{name} cannot see .*unplace\(\), and .*pipe\.module"):
        capture(pipeline())


def test_a_model_that_was_compiled_before_is_refused() -> None:
    """``pipe.compile()`` compiles its parts."""
    with pytest.raises(CrossingError, match=r"leave torch\.compile out and call pipe\.compile\(\)"):
        pipeline(torch.compile(linears(2), backend="eager"))(X)


# --- the model's own loss


class WithLoss(nn.Module):
    def __init__(self, give: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.give = nn.Linear(4, 4), give

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.fc(x)
        return self.give(out, F.mse_loss(out, y))


@pytest.mark.parametrize(
    "give",
    [
        lambda out, loss: (out, loss),
        lambda out, loss: [out, torch.tensor(3), loss],
        lambda out, loss: (loss, torch.zeros(())),
    ],
    ids=["PopTorch's order", "beside a count", "the first of several"],
)
def test_the_one_number_of_a_tuple_is_the_loss(give: Callable[..., Any]) -> None:
    """Wherever it stands, if there is one alone; else the first element."""
    model, y = WithLoss(give), torch.zeros(4, 4)
    found = pipeline(model, devices=["cpu"]).forward_backward(X, y).loss
    torch.testing.assert_close(found, F.mse_loss(model.fc(X), y).detach())


def test_two_numbers_of_a_tuple_are_not_a_loss() -> None:
    """Neither of them comes first, so that neither can be meant."""
    model = WithLoss(lambda out, loss: (out, loss, loss))
    with pytest.raises(UsageError, match="returned tuple without a loss"):
        pipeline(model, devices=["cpu"]).forward_backward(X, X)
