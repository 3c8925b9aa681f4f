"""State dicts in and out of a pipeline."""

import json
import os

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import UsageError, WeightsError
from blockpipe.weights.safetensors_file import write_tensors

from ..stage_devices import assert_close, equal, stages
from .saved_models import X, copies, make, pipeline, same_state, step

# --- load_state_dict


def test_state_dicts_go_every_way():
    """From a pipeline to the plain model strictly and back, and to a pipeline of other cuts."""
    pipe = pipeline()
    step(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    state = copies(pipe.state_dict())
    plain = make()
    plain.load_state_dict(state, strict=True)
    assert same_state(plain.state_dict(), state)
    other = pipeline(cuts=(1, 2, 3, 4))
    other(X)
    other.load_state_dict(plain.state_dict())
    assert same_state(other.state_dict(), state)
    with torch.device("meta"):
        net = make(cuts=(3,))
    late = pipeline(net, cuts=(3,))
    assert late.load_state_dict(state).missing_keys == []
    assert_close(late.eval()(X), plain.eval()(X))


class Holds(nn.Module):
    """A module around a pipeline, with a parameter of its own."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe, self.scale = pipe, nn.Parameter(torch.ones(1))


class Versioned(nn.Linear):
    """Notes the version of the state that it gets."""

    _version = 7
    seen = 0

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        Versioned.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def nested(place):
    net = nn.Sequential(Versioned(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = bp.Pipeline(bp.begin_blocks(net, {"2": 1}), devices=stages(2), chunks=2)
    if place:
        pipe(torch.randn(4, 4))
    return pipe


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("around", [Holds, torch.optim.swa_utils.AveragedModel])
def test_a_module_around_a_pipeline_loads_what_it_saved(around, placed):
    """By the plain model's names, as a pipeline; the versions of modules come too."""
    one, other = around(nested(placed)), around(nested(placed))
    state = one.state_dict()
    assert not any("module.module" in name for name in state)
    Versioned.seen = 0
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert Versioned.seen == 7
    assert same_state(other.state_dict(), state)
    del state[next(name for name in state if name.endswith("0.weight"))]
    assert len(other.load_state_dict(state, strict=False).missing_keys) == 1
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state)


def test_a_module_around_a_pipeline_on_meta_loads_what_it_saved():
    """The values are there once it is placed."""
    one = Holds(nested(True))
    with torch.device("meta"):
        other = Holds(nested(False))
    other.scale = nn.Parameter(torch.ones(1))
    other.load_state_dict(one.state_dict())
    other.pipe.eval()(torch.randn(4, 4))
    assert same_state(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("placed", [False, True])
def test_a_state_dict_that_does_not_fit_changes_nothing(placed):
    """Every misfit is named, with its stage where the model is recorded, and both shapes."""
    pipe = pipeline()
    if placed:
        pipe(X)
    state = {n: t + 1 for n, t in pipe.state_dict().items()}
    del state["2.bias"]
    state["4.bias"] = torch.zeros(9)
    state["4.more"] = torch.zeros(2)
    before = copies(pipe.state_dict())
    with pytest.raises(WeightsError, match="does not fit") as caught:
        pipe.load_state_dict(state)
    stages = [f" (stage {n})" if placed else "" for n in (1, 2)]
    assert f"missing: '2.bias'{stages[0]}, float32[6]" in str(caught.value)
    assert f"wrong shape: '4.bias'{stages[1]}: [6] in the model, [9] in" in str(caught.value)
    assert f"unexpected: '4.more'{stages[1]}, float32[2]" in str(caught.value)
    assert same_state(pipe.state_dict(), before)


def test_a_load_that_is_not_strict_returns_the_keys():
    """Missing and unexpected keys are returned, wrong shapes raise all the same."""
    pipe = pipeline()
    state = pipe.state_dict()
    del state["2.bias"]
    state["more"] = torch.zeros(2)
    keys = pipe.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["2.bias"], ["more"])
    state["4.bias"] = torch.zeros(9)
    with pytest.raises(WeightsError, match=r"wrong shape: '4.bias'"):
        pipe.load_state_dict(state, strict=False)
    with torch.device("meta"):
        net = make()
    del state["4.bias"]
    late = pipeline(net, init="reset_parameters")
    keys = late.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["2.bias", "4.bias"], ["more"])
    with pytest.warns(UserWarning, match=r"'2.bias' .stage 1, .*\n  '4.bias' .stage 2"):
        late(X)
    assert equal(net[2].weight, state["2.weight"])


def test_one_name_of_a_tied_tensor_is_enough():
    """A strict load takes it, as checkpoints of Hugging Face have it."""
    pipe, state = pipeline(), make().state_dict()
    del state["4.weight"]
    pipe.load_state_dict(state)
    assert equal(pipe.module[4].weight, state["0.weight"])
    assert pipe.module[4].weight is pipe.module[0].weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_of_a_tied_tensor_that_are_missing_are_returned(device):
    """As a plain model does where it is not strict; ``safetensors.torch.load_model`` counts on it."""
    state, plain = make().state_dict(), make()
    del state["4.weight"], state["2.bias"]
    with torch.device(device):
        net = make()
    pipe = pipeline(net, init="reset_parameters" if device == "meta" else None)
    found = pipe.load_state_dict(state, strict=False)
    assert found == plain.load_state_dict(state, strict=False)
    assert found.missing_keys == ["2.bias", "4.weight"]


def test_models_with_hooks_of_their_own_load_as_plain():
    """Renamed keys and old versions load as into the plain model; what fails changes nothing."""

    class Renaming(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *args):
            if f"{prefix}kernel" in state:
                state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
            super()._load_from_state_dict(state, prefix, *args)

    net = nn.Sequential(Renaming(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    pipe = pipeline(bp.begin_blocks(net, {"2": 1}), cuts=(2,))
    pipe(X)
    state = {n: t for n, t in pipe.state_dict().items() if not n.endswith("tracked")}
    state["0.kernel"] = state.pop("0.weight") + 1
    pipe.load_state_dict(state)  # without versions: before BatchNorm counted its batches
    assert equal(net[0].weight, state["0.kernel"])
    before = copies(pipe.state_dict())
    state["0.kernel"] = torch.zeros(2, 2)
    with pytest.raises(WeightsError, match="unexpected: '0.kernel' .stage 0., float32.2, 2."):
        pipe.load_state_dict(state)
    assert same_state(pipe.state_dict(), before)


class Renamed(nn.Linear):
    """Hears an old name of its weight, and has extra state."""

    note = "a"

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state, prefix, *rest):
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def renamed():
    return bp.begin_blocks(nn.Sequential(Renamed(6, 6), nn.Linear(6, 6)), {"1": 1})


def test_a_state_dict_for_a_model_on_meta():
    """As into the plain model: renaming hooks and extra state are heard, strictly, at once."""
    plain = renamed()
    plain[0].note = "b"
    state = plain.state_dict()
    state["0.kernel"] = state.pop("0.weight")
    names = set(state)
    with torch.device("meta"):
        net = renamed()
    pipe = pipeline(net, cuts=(1,))
    keys = pipe.load_state_dict(state)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert set(state) == names
    assert_close(pipe(X), plain(X))
    assert net[0].note == "b"

    with torch.device("meta"):
        net = renamed()
    pipe = pipeline(net, cuts=(1,), init="reset_parameters")
    del state["1.bias"]
    with pytest.raises(WeightsError, match="missing: '1.bias'"):
        pipe.load_state_dict(state)
    keys = pipe.load_state_dict(state, strict=False)
    assert keys.missing_keys == ["1.bias"]
    with pytest.warns(UserWarning, match="lacks\n  '1.bias'"):
        pipe(X)
    assert equal(net[0].weight, state["0.kernel"])


def test_a_state_dict_with_gaps_for_a_model_on_meta():
    """Not strict and without ``init=``: what nothing gives values to is named at once, and what has
    values keeps them."""
    net = make()
    state = {n: t for n, t in net.state_dict().items() if n != "2.bias"}
    with torch.device("meta"):
        late = pipeline(make())
    with pytest.raises(WeightsError, match="missing: '2.bias'"):
        late.load_state_dict(state, strict=False)
    late.module[2] = nn.Linear(6, 6)
    bp.begin_blocks(late.module, {"2": 1})
    bias = late.module[2].bias.detach().clone()
    assert late.load_state_dict(state, strict=False).missing_keys == ["2.bias"]
    late(X)
    assert equal(late.module[2].bias, bias)
    assert equal(late.module[2].weight, state["2.weight"])


@pytest.mark.parametrize("kind", ["mapping", "torch", "index", "safetensors"])
@pytest.mark.parametrize("meta", [False, True])
def test_extra_state_in_weights(tmp_path, kind, meta):
    """It goes through ``set_extra_state``; what no module asks for is unexpected."""
    plain = renamed()
    plain[0].note = torch.tensor([3.0]) if kind == "safetensors" else "b"
    state = plain.state_dict()
    torch.save(state, tmp_path / "x.pt")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "x.pt")}))
    if kind == "safetensors":
        write_tensors(tmp_path / "x.safetensors", state)
    files = {"mapping": state, "index": index, "torch": tmp_path / "x.pt"}
    weights = files.get(kind, tmp_path / "x.safetensors")
    with torch.device("meta" if meta else "cpu"):
        net = renamed()
    pipe = pipeline(net, cuts=(1,), weights=weights)
    pipe(X)
    assert net[0].note == plain[0].note
    assert_close(pipe(X), plain(X))
    with torch.device("meta" if meta else "cpu"):
        other = bp.begin_blocks(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), {"1": 1})
    with pytest.raises(WeightsError, match="unexpected: '0._extra_state', for which no module"):
        pipeline(other, cuts=(1,), weights=weights, sample=((X,), {}))


class Turning(nn.Module):
    """Its extra state says which way it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return h * self.scale if self.scale < 1.5 else h.tanh()


def test_extra_state_that_weights_bring_is_recorded() -> None:
    """Attack 47: the recording was of the value before, and a step took the new one for a write of
    the forward's: a warning, and one by one from then on."""
    plain = Turning()
    plain.scale = 2.0
    with torch.device("meta"):
        net = bp.begin_blocks(Turning(), {"b": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, weights=plain.state_dict())
    x = torch.randn(6, 6)
    for _ in range(2):
        pipe.forward_backward(x, loss_fn=torch.sum)
    assert net.scale == 2.0
    assert_close(pipe(x), plain(x))


def test_extra_state_is_the_models_own():
    """What is no tensor goes through ``set_extra_state``."""

    class Extra(nn.Linear):
        note = "a"

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    one, other = (pipeline(nn.Sequential(Extra(6, 6)), cuts=()) for _ in range(2))
    one.module[0].note = "b"
    other.load_state_dict(one.state_dict())
    assert other.module[0].note == "b"
    state = {n: t + 1 for n, t in one.state_dict().items() if not n.endswith("state")}
    before = copies(dict(other.module.named_parameters()))
    with pytest.raises(WeightsError, match="missing: '0._extra_state'"):
        other.load_state_dict(state)
    with pytest.raises(WeightsError, match="missing: '0.weight'"):
        other.load_state_dict({**state, "0._extra_state": {"note": "c"}, "0.weight": [1.0]})
    with pytest.raises(WeightsError, match="unexpected: 'epoch', a int"):
        other.load_state_dict({**state, "0._extra_state": {"note": "c"}, "epoch": 3})
    assert same_state(dict(other.module.named_parameters()), before)
    with pytest.raises(
        WeightsError, match="'0._extra_state' comes from a module's get_extra_state"
    ):
        one.save_weights("never-made")
    assert not os.path.exists("never-made")


def test_a_lazy_model_gets_its_shapes_from_the_dictionary():
    """Its shapes come with the dictionary, as for the plain model."""
    pipe = pipeline(nn.Sequential(nn.LazyLinear(6)), cuts=())
    state = {"0.weight": torch.ones(6, 3), "0.bias": torch.zeros(6)}
    pipe.load_state_dict(state)
    assert equal(pipe.module[0].weight, state["0.weight"])


def test_assign_and_wrong_kinds_are_refused():
    """They would take the parameters off their stages."""
    pipe = pipeline()
    with pytest.raises(UsageError, match="stay the same objects .* leave it out"):
        pipe.load_state_dict(pipe.state_dict(), assign=True)
    with pytest.raises(
        UsageError, match=r"for state_dict, got 'model.pt' .*for a file call load_weights"
    ):
        pipe.load_state_dict("model.pt")
