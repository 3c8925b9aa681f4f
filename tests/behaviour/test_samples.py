"""Batches that are lists of samples, as detection models take them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import MicrobatchError

from ..parity import compare
from ..stage_devices import assert_close, host, stages


class Detector(nn.Module):
    """Images of any size, and a dictionary for each; in training it returns losses."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.boxes = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images, targets=None):
        with bp.Block(stage=0):
            rows = torch.stack([self.features(image).mean((1, 2)) for image in images])
        with bp.Block(stage=1):
            found = self.boxes(rows)
        if targets is None:
            return [{"boxes": boxes} for boxes in found]
        wanted = torch.stack([target["boxes"] for target in targets])
        return {"l1": F.l1_loss(found, wanted), "l2": F.mse_loss(found, wanted)}


def _batch(count: int = 5) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images = [torch.rand(3, 8, 6 + n) for n in range(count)]
    return images, [{"boxes": torch.rand(4)} for _ in images]


def _total(losses: dict[str, Tensor]) -> Tensor:
    return sum(losses.values(), torch.zeros(()))


def _pipe(model: nn.Module, **dims: object) -> bp.Pipeline:
    return bp.Pipeline(model, devices=stages(2), chunks=3, batch_dims=dims)


@pytest.mark.parametrize("by_name", [False, True])
def test_training_on_lists_is_the_whole_batchs_step(by_name):
    """Losses and gradients are the weighted mean's over uneven micro-batches."""
    images, targets = _batch()
    model = Detector()
    _total(model(images, targets)).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    pipe = _pipe(model, images="list", targets="list")
    given = ((images,), {"targets": targets}) if by_name else ((images, targets), {})
    pipe.forward_backward(*given[0], **given[1], loss_fn=_total)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted[name])


def test_the_sweep_compares_models_of_lists():
    """Its plain loop splits as its pipeline does: by elements, here of differing sizes."""
    images, targets = _batch()
    dims = {"images": "list", "targets": "list"}
    given = {"images": images, "targets": targets}
    found, _ = compare(
        Detector(), (), given, {"boxes": 1}, loss_fn=_total, chunks=3, batch_dims=dims
    )
    assert found.same


def test_results_are_joined_by_elements_and_differentiable():
    images, _ = _batch()
    images[3].requires_grad_()
    model = Detector()
    wanted = [found["boxes"] for found in model(images)]
    (gradient,) = torch.autograd.grad(torch.stack(wanted).square().sum(), images[3])
    found = _pipe(model, images="list", targets="list")(images)
    assert [list(item) for item in found] == [["boxes"]] * 5
    for item, boxes in zip(found, wanted, strict=True):
        assert_close(item["boxes"], boxes)
    torch.stack([item["boxes"] for item in found]).square().sum().backward()
    assert_close(images[3].grad, gradient)


def test_gradients_of_elements_go_to_the_images():
    """Also after a list of another argument, of which micro-batches have more and fewer leaves."""
    images, targets = _batch()
    for leaf in (images[0], images[4], targets[2]["boxes"]):
        leaf.requires_grad_()
    model = Detector()
    wanted = torch.autograd.grad(
        _total(model(images, targets)), [images[0], images[4], targets[2]["boxes"]]
    )
    pipe = _pipe(model, images="list", targets="list")
    pipe.forward_backward(images, targets, loss_fn=_total)
    for leaf, gradient in zip((images[0], images[4], targets[2]["boxes"]), wanted, strict=True):
        assert_close(leaf.grad, gradient)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x, other=None):
        x = torch.stack(list(x)) if isinstance(x, list | tuple) else x
        return self.b(self.a(x))


SAMPLES = [
    ([torch.ones(4, 8)] * 3,),
    (tuple(torch.ones(4, 8) for _ in range(4)),),
    ([{"x": torch.ones(4, 8)}, {"x": torch.ones(4, 8)}],),
    ({"images": [torch.ones(3, 8, 8)] * 4},),
    (torch.ones(4, 8), [torch.ones(3)] * 4),
    (torch.ones(4, 8), ["a", "b", "c", "d"]),
    (torch.ones(4, 8), [(torch.ones(2), 1)] * 4),
    (torch.ones(4, 8), [torch.tensor(1.0)] * 4),
    (torch.ones(4, 8), [3, 1, 2, 1]),
    (torch.ones(4, 8), [(8, 9), (7, 9), (8, 8), (8, 9)]),
    (torch.ones(4, 8), [{"id": n, "name": "a"} for n in range(4)]),
    (torch.ones(4, 8), {"lengths": [3, None, 2, 1]}),
]


@pytest.mark.parametrize("args", SAMPLES, ids=range(len(SAMPLES)))
def test_a_list_that_may_hold_samples_is_refused(args):
    """It was split inside each element, or went whole to each micro-batch, without a word."""
    pipe = bp.Pipeline(Mean(), devices=stages(2), chunks=2)
    with pytest.raises(MicrobatchError, match=r"may be a list of \d samples.*'list'"):
        pipe(*args)


@pytest.mark.parametrize(
    "each", [torch.ones(2), torch.tensor(1.0), 3], ids=["1-d", "0-d", "number"]
)
def test_a_target_that_may_hold_samples_is_refused(each):
    pipe = bp.Pipeline(Mean(), devices=stages(2), chunks=2)
    with pytest.raises(MicrobatchError, match="the target may be a list of 4 samples"):
        pipe.forward_backward(
            torch.ones(4, 8), target=[each] * 4, loss_fn=lambda out, target: out.sum()
        )


def test_numbers_when_their_argument_is_named_a_list_are_split():
    """Each micro-batch read those of the first samples."""

    class Scales(Mean):
        def forward(self, x, other=None):
            return super().forward(x) * torch.tensor(other, device=x.device)[:, None]

    model, x, scales = Scales(), torch.randn(5, 8), [1.0, 2.0, 3.0, 4.0, 5.0]
    wanted = model(x, scales)
    assert_close(_pipe(model, other="list")(x, scales), wanted)


def test_a_target_when_only_some_of_its_tensors_fit_says_where_the_others_go():
    """To give every micro-batch all of it, as was said, would be wrong for those that fit."""
    pipe = bp.Pipeline(Mean(), devices=stages(2), chunks=2)
    with pytest.raises(MicrobatchError, match=r"for the target, got \(3,\) .*let loss_fn have it"):
        pipe.forward_backward(
            torch.ones(4, 8),
            target=(torch.ones(4), torch.ones(3)),
            loss_fn=lambda out, _: out.sum(),
        )


RECORDS = [
    (torch.ones(4, 8), [torch.ones(4, 2), torch.ones(4, 3)]),  # all rows each
    ((torch.ones(4, 8), torch.ones(4)),),  # of differing dims: a record
    (torch.ones(4, 8), [1, 2, 3]),
    (torch.ones(4, 8), (1, 2, 3, 4)),  # one size
    (torch.ones(4, 8), [None] * 4),
    (torch.ones(4, 8), [[1, 2, 3, 4], [5, 6, 7, 8]]),  # two settings of four numbers
    (torch.ones(4, 8), [torch.ones(2)] * 3),  # another length
    ((torch.ones(4, 8), [torch.ones(2)] * 3),),  # beside the tensor that has the batch
    (torch.ones(1, 8), [1]),
]


@pytest.mark.parametrize("args", RECORDS, ids=range(len(RECORDS)))
def test_records_are_split_inside_as_ever(args):
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
            bp.BeginBlock(self.b, stage=1)

        def forward(self, x, *rest):
            return self.b(self.a(x[0] if isinstance(x, tuple) else x))

    out = bp.Pipeline(Takes(), devices=stages(2), chunks=2)(*args)
    assert out.shape in [(4, 4), (1, 4)]


def test_an_array_with_the_batchs_rows_is_refused():
    """Every micro-batch got all of it."""
    numpy = pytest.importorskip("numpy")
    pipe = bp.Pipeline(Mean(), devices=stages(2), chunks=2)
    with pytest.raises(
        MicrobatchError, match="a tensor with the batch's 4 rows for argument 1, got ndarray"
    ):
        pipe(torch.ones(4, 8), numpy.ones((4, 2)))
    pipe = bp.Pipeline(Mean(), devices=stages(2), chunks=2, batch_dims={"other": None})
    assert pipe(torch.ones(4, 8), numpy.ones((4, 2))).shape == (4, 4)


def test_a_list_that_is_none_or_of_another_length_is_refused():
    with pytest.raises(MicrobatchError, match="one element a sample for argument 0, got Tensor"):
        _pipe(Mean(), x="list")(torch.ones(4, 8))
    with pytest.raises(
        MicrobatchError, match="as many elements as the batch has samples, 4, .*got 3"
    ):
        _pipe(Mean(), other="list")(torch.ones(4, 8), [1, 2, 3])


def test_outputs_that_are_no_lists_of_samples_are_refused_where_they_should_be():
    pipe = _pipe(Mean(), output="list")
    with pytest.raises(
        MicrobatchError, match=r"a list of 2 elements, one a sample, for the output, got Tensor"
    ):
        pipe(torch.ones(4, 8))


class Rows(nn.Module):
    """Takes a list of samples, and gives of their rows what it is told to."""

    def __init__(self, gives) -> None:
        super().__init__()
        self.a, self.b, self.gives = nn.Linear(8, 8), nn.Linear(8, 4), gives
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x):
        return self.gives(self.b(self.a(torch.stack(x))))


TWO_OUTPUTS = {
    "tensors": lambda rows: (rows, 2 * rows),
    "losses": lambda rows: [rows.mean(), rows.square().mean()],
    "pairs": lambda rows: ((rows, rows.mean()), (2 * rows, rows.amax())),
}


@pytest.mark.parametrize("gives", TWO_OUTPUTS.values(), ids=TWO_OUTPUTS)
def test_two_outputs_that_may_be_two_samples_are_refused_until_they_are_named(gives):
    """They were joined as four samples."""
    x, model = [torch.randn(8) for _ in range(6)], Rows(gives)
    rows = model.b(model.a(torch.stack(x)))
    with pytest.raises(MicrobatchError, match="one element for each of its 2 samples, or hold"):
        _pipe(model, x="list")(x)
    found = _pipe(model, x="list", output=0)(x)
    assert len(found) == 2
    assert len(_pipe(model, x="list", output="list")(x)) == 6
    first = found[0][0] if isinstance(found[0], tuple) else found[0]
    assert_close(first, rows.mean() if first.dim() == 0 else rows)


UNLIKE = {
    "loss": lambda rows: (rows.square().mean(), rows),
    "none": lambda rows: (rows, None),
    "dtype": lambda rows: (rows, rows.argmax(1)),
}


@pytest.mark.parametrize("gives", UNLIKE.values(), ids=UNLIKE)
def test_two_outputs_of_two_kinds_are_no_samples(gives):
    """A loss beside outputs was that of the first micro-batch only."""
    x, model = [torch.randn(8) for _ in range(6)], Rows(gives)
    wanted = model(x)
    assert_close(tuple(_pipe(model, x="list")(x)), wanted)


def test_a_sample_that_is_a_mapping_may_have_as_many_boxes_as_there_are_samples():
    x = [torch.randn(8) for _ in range(6)]
    found = _pipe(Rows(lambda rows: [{"boxes": row.repeat(2, 1)} for row in rows]), x="list")(x)
    assert [list(item["boxes"].shape) for item in found] == [[2, 4]] * 6


def test_a_list_of_samples_inside_of_an_output_when_arguments_are_lists_is_refused():
    """It was joined element by element, as if each had all samples."""
    x = [torch.randn(8) for _ in range(6)]
    model = Rows(lambda rows: {"found": [{"row": row} for row in rows], "size": (8, 8)})
    with pytest.raises(
        MicrobatchError, match=r"output\['found'\] of a micro-batch may have .* 2 sa"
    ):
        _pipe(model, x="list")(x)
    assert len(_pipe(model, x="list", output=None)(x)) == 3
    scales = Rows(lambda rows: {"scales": (rows, 2 * rows, 3 * rows)})
    assert [len(scale) for scale in _pipe(scales, x="list")(x)["scales"]] == [6] * 3


class Listed(Rows):
    def forward(self, x):
        return super().forward(list(x))


ROW_BY_ROW = {
    "list": (list, "as its length says, pass batch_dims={'output': 'list'}"),
    "inside": (
        lambda rows: {"found": list(rows)},
        r"if output\['found'\] has one element a sample",
    ),
}


@pytest.mark.parametrize(("gives", "match"), ROW_BY_ROW.values(), ids=ROW_BY_ROW)
def test_a_list_that_follows_the_number_of_samples_when_arguments_are_tensors_is_refused(
    gives, match
):
    """Micro-batches of two and of one: their lists have two elements and one."""
    with pytest.raises(MicrobatchError, match=match):
        _pipe(Listed(gives))(torch.randn(5, 8))


def test_two_outputs_of_two_samples_when_arguments_are_tensors_are_two_outputs():
    """As they are in micro-batches of any other size, until the output is named a list."""
    x = torch.randn(6, 8)
    for gives, dims in ((lambda rows: [rows, 2 * rows], {}), (list, {"output": "list"})):
        model = Listed(gives)
        wanted = model(x)
        assert_close(_pipe(model, **dims)(x), wanted)


def test_a_name_that_no_argument_has_is_refused():
    """One that the forward has and this call leaves out is not."""
    pipe = _pipe(Mean(), other=None)
    assert pipe(torch.ones(4, 8)).shape == (4, 4)
    with pytest.raises(MicrobatchError, match=r"for batch_dims, got \['imagse'\]"):
        _pipe(Mean(), imagse="list")(torch.ones(4, 8))


@pytest.mark.cpu("a detection model's own code needs no second run")
def test_a_detection_model_of_torchvision_trains():
    """Exact, micro-batch by micro-batch; its losses are of sampled anchors, so not the batch's."""
    detection = pytest.importorskip("torchvision.models.detection")
    backbone = nn.Sequential(nn.Conv2d(3, 8, 7, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
    backbone.out_channels = 8
    model = detection.FasterRCNN(
        backbone,
        num_classes=3,
        min_size=64,
        max_size=96,
        rpn_anchor_generator=detection.anchor_utils.AnchorGenerator(((16, 32),), ((1.0,),)),
        rpn_pre_nms_top_n_train=20,
        rpn_post_nms_top_n_train=10,
        rpn_pre_nms_top_n_test=20,
        rpn_post_nms_top_n_test=10,
    )
    bp.begin_blocks(model, {"rpn": 1})
    images = [torch.rand(3, 64, 48 + 8 * n) for n in range(2)]
    boxes = torch.tensor([[4.0, 4.0, 30.0, 40.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1 + n])} for n in range(2)]
    pipe = bp.Pipeline(
        model, devices=stages(2), chunks=2, batch_dims={"images": "list", "targets": "list"}
    )
    assert pipe.verify(images, targets, loss_fn=_total).verdict == "exact"
    model.eval()
    with torch.no_grad():
        found = pipe(images)
        for item, image in zip(host(found), images, strict=True):
            assert_close(item["boxes"], model([image])[0]["boxes"])


class Gives(Mean):
    def __init__(self, form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x, other=None):
        return self.form(super().forward(x))


OUTPUTS = {
    "lists": lambda o: ([r[None, :3] for r in o], [r[3:] for r in o]),
    "mappings": lambda o: ({"logits": o, "loss": o.mean()}, {"logits": o * 2, "loss": o.mean()}),
    "numbers": lambda o: (0.5, 2.0),
}


@pytest.mark.parametrize("form", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_that_may_be_samples_when_micro_batches_have_as_many_are_refused(form):
    """They were joined as samples: three pairs of lists became six lists."""
    pipe = bp.Pipeline(Gives(form), devices=stages(2), chunks=3, batch_dims={"x": "list"})
    x = list(torch.randn(6, 8))
    with pytest.raises(
        MicrobatchError, match="of 2, may have one element for each .*or (be 2 out|hold)"
    ):
        pipe(x)
    pipe.batch_dims = {"x": "list", "output": None}
    assert len(pipe(x)) == 3


SAMPLE_OUTPUTS = {
    "boxes and scores": lambda o: [[r[None, :3], r[3:].sum()] for r in o],
    "boxes of another number": lambda o: [{"boxes": r[None]} for r in o],
    "scores": lambda o: [{"score": r.sum()} for r in o],
    "texts": lambda o: [str(len(r)) for r in o],
    "pairs": lambda o: [(len(r), 0) for r in o],
    "words": lambda o: [["a", str(len(r))] for r in o],
}


@pytest.mark.parametrize("form", SAMPLE_OUTPUTS.values(), ids=SAMPLE_OUTPUTS)
def test_outputs_that_are_samples_by_their_kinds_are_joined_by_elements(form):
    pipe = bp.Pipeline(Gives(form), devices=stages(2), chunks=3, batch_dims={"x": "list"})
    assert len(pipe(list(torch.randn(6, 8)))) == 6
