"""What stages hand on: results as recorded, gradients or their absence, hooks as in a plain loop."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline
from blockpipe.distributed.microbatches.engine_stage import check_results
from blockpipe.distributed.microbatches.no_gradient import is_no_gradient, no_gradient
from blockpipe.distributed.taping.tape import Meta
from blockpipe.errors import RouteError, StateError, UsageError

from .. import ranks

pytestmark = [
    pytest.mark.cpu("the process group has no simulated accelerator"),
    pytest.mark.usefixtures("one_process"),
    ranks.NEEDS_SCHEDULES,
]


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Two(nn.Module):
    """Two layers on two stages, with a test's code before the second one."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x).tanh()
        with bp.Block(stage=1):
            k = self.second(self.between(h))
            return k + 1.0


def pipe_of(model: nn.Module, schedule: str = "looped-bfs") -> DistributedPipeline:
    """Two stages in this process."""
    options: dict[str, Any] = {"device": "cpu", "chunks": 2, "schedule": schedule}
    return DistributedPipeline(model, sample=torch.ones(4, 4), **options)


def assert_steps_alike(model: nn.Module, schedule: str) -> None:
    """Gradients are those of the plain loop; none where it has none."""
    plain, x, y = copy.deepcopy(model), torch.randn(4, 4), torch.randn(4, 4)
    pipe_of(model, schedule).forward_backward(x, target=y, loss_fn=mse_loss)
    for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
        (mse_loss(plain(part), wanted) / 2).backward()
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_word_for_no_gradient_is_told_from_every_gradient(dtype: torch.dtype) -> None:
    """Also from one that is no number everywhere."""
    like = torch.zeros(2, 3, dtype=dtype)
    word = no_gradient(like, like.device)
    assert word is not None
    assert is_no_gradient(word)
    mixed = word.clone()
    mixed[1, 2] = 0.0
    assert not any(map(is_no_gradient, (like, torch.full_like(like, torch.nan), mixed)))


@pytest.mark.parametrize("schedule", ["looped-bfs", "zb-h1", "zb-v"])
def test_stage_without_a_gradient_has_none(schedule: str) -> None:
    """As in the plain loop: zeros would have an optimizer move it by its momentum."""
    assert_steps_alike(Two(Tensor.detach), schedule)


class Doubled(nn.Module):
    """A layer that doubles the gradient of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


class Glued(Two):
    """The same between the modules."""

    def __init__(self) -> None:
        super().__init__(Tensor.tanh)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            k = self.second(h)
            k.register_hook(lambda gradient: 2 * gradient)
            return k + h


@pytest.mark.parametrize("schedule", ["looped-bfs", "zb-h1", "zb-v"])
@pytest.mark.parametrize("in_glue", [False, True])
def test_hook_on_a_tensor_counts_once(schedule: str, in_glue: bool) -> None:
    """Also where the backward is run in two parts."""
    model = Glued() if in_glue else Two(Tensor.tanh)
    if not in_glue:
        model.second = Doubled()  # type: ignore[assignment]
    assert_steps_alike(model, schedule)


class Again(Two):
    """Calls two layers in turn on its second stage."""

    def __init__(self) -> None:
        super().__init__(Tensor.tanh)
        self.middle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            for _ in range(3):
                h = self.middle(self.second(h)).tanh()
            return h


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_layers_that_a_stage_uses_in_turn_have_the_plain_gradients(schedule: str) -> None:
    """Also where the backward is run in two parts."""
    assert_steps_alike(Again(), schedule)


@pytest.mark.parametrize("schedule", ["looped-bfs", "zb-h1"])
def test_hook_after_a_gradient_is_refused_where_backwards_come_in_another_way(
    schedule: str,
) -> None:
    """Before the step: the next one works."""
    model = Two(Tensor.tanh)
    pipe = pipe_of(model, schedule)
    hook = model.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))
    with pytest.raises(UsageError, match=r"got one on parameter 'first\.weight'"):
        pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
    hook.remove()
    pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)


def test_hook_that_steps_too_early_is_refused() -> None:
    """A later micro-batch's forward has read the parameter."""
    model = nn.Sequential(nn.Linear(4, 4))
    pipe = pipe_of(model, "gpipe")

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    model[0].weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(StateError, match="until the last micro-batch, got one that steps"):
        pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (torch.ones(2, 3), r"float32\[2, 3\]"),
        (torch.ones(2, 4).bfloat16(), r"bfloat16\[2, 4\]"),
        (torch.ones(2, 4, requires_grad=True), r"float32\[2, 4\] that needs a gradient"),
    ],
)
def test_result_that_is_not_as_recorded_is_refused_with_both(result: Tensor, got: str) -> None:
    """Its receiver would read other memory, or send no gradient."""
    meta = Meta((2, 4), torch.float32, requires_grad=False)
    said = rf"expected a result of float32\[2, 4\] from module 'a', .*got {got}"
    with pytest.raises(RouteError, match=said):
        check_results((result,), [meta], ["module 'a'"])


def test_result_of_another_size_may_stay_in_the_process() -> None:
    """The next stage is given it as it is."""

    class Narrow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y[:, :2] if x.sum() > 0 else y

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1)

    model = nn.Sequential(Narrow(4, 4), Sums())
    pipe = pipe_of(bp.begin_blocks(model, {"1": 1}).eval())
    for x in (torch.ones(4, 4), -torch.ones(4, 4)):
        with torch.no_grad():
            assert pipe(x).equal(model(x))
