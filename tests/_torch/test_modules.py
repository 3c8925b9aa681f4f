"""What ``_torch/modules.py`` relies on."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_all

from blockpipe._torch import modules


def net():
    made = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    made.register_buffer("unsaved", torch.ones(1), persistent=False)
    return made


def test_slots_are_what_the_module_reads():
    model = net()
    slots = {
        "parameters": modules.parameters_of(model[0]),
        "buffers": modules.buffers_of(model),
        "children": modules.children_of(model),
    }
    assert list(slots["parameters"]) == ["weight", "bias"], (
        "torch leaves out parameters without value"
    )
    assert list(slots["buffers"]) == ["unsaved"]
    assert list(slots["children"]) == ["0", "1"]
    assert all(vars(model)[name] is not None for name in modules.SLOTS)
    replaced = slots["buffers"]["unsaved"] = torch.zeros(1)
    assert model.unsaved is replaced, (
        "torch's modules no longer read the dictionaries in which batch norm's buffers are replaced"
    )


def test_slots_are_found_in_vars():
    model = net()
    found = [vars(model)[name] for name in modules.SLOTS]
    readers = modules.parameters_of, modules.buffers_of, modules.children_of
    assert all(names is of(model) for names, of in zip(found, readers, strict=True)), (
        "torch's modules have their tensors under other names"
    )
    assert modules.SLOTS[2] == modules.CHILDREN


def test_unsaved_buffers():
    assert modules.unsaved_buffers_of(net()) == {"unsaved"}, (
        "torch no longer notes which buffers a state dict leaves out"
    )


def test_forward_pre_hooks_go_by_the_id_of_their_handle():
    model, ran = net(), []
    handle = model.register_forward_pre_hook(lambda module, args: ran.append(module))
    copied = copy.deepcopy(model)
    assert modules.forward_pre_hooks_of(copied).pop(handle.id, None) is not None, (
        "torch's copied modules have their hooks under other numbers: marks would stay on them"
    )
    copied(torch.ones(2, 2))
    assert not ran
    model(torch.ones(2, 2))
    assert ran == [model]


def test_compiled_in_place():
    model = net()
    assert not modules.is_compiled(model)
    model.compile(backend="eager")
    assert modules.is_compiled(model), "torch's Module.compile() leaves its call elsewhere"
    ran = []
    vars(model)[modules.COMPILED_CALL] = lambda *args: ran.append(args)
    model(torch.ones(2, 2))
    assert ran, (
        "torch's modules no longer run their compiled call, for which a stand-in is put there"
    )


def test_the_method_behind_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(nn.Module, modules.CALL, lambda *args: ran.append(args))
    model = net()
    model(1)
    assert ran == [(model, 1)], (
        "torch's modules no longer call this method, which waits while another thread records"
    )


def test_compiled_in_a_wrapper():
    assert modules.is_compiled(torch.compile(net(), backend="eager")), (
        "torch.compile's wrapper no longer has the module in _orig_mod"
    )


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norms_have_one_base(kind):
    assert issubclass(kind, modules.BatchNorm)
    made = kind(2)
    found = {*modules.buffers_of(made)}
    assert found >= {"running_mean", "running_var", "num_batches_tracked"}


def test_incompatible_keys():
    found = net().load_state_dict({}, strict=False)
    assert type(found) is modules.IncompatibleKeys, (
        "torch returns something else from load_state_dict"
    )
    made = modules.IncompatibleKeys(["a"], ["b"])
    assert (made.missing_keys, made.unexpected_keys) == (["a"], ["b"])


class OfSomeVersion(nn.Module):
    _version = 3

    def __init__(self):
        super().__init__()
        self.loaded = []

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.loaded.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_versions_of_a_state_dict():
    model = OfSomeVersion()
    state = model.state_dict()
    assert modules.versions_in(state)[""] == {"version": 3}, (
        "torch's state dicts no longer carry their modules' versions in _metadata"
    )
    kept = type(state)(state)
    modules.keep_versions(state, kept)
    model.load_state_dict(kept)
    assert model.loaded == [3], (
        "torch's load_state_dict no longer reads versions from the dictionary"
    )
    assert modules.versions_in({}) == {}
    modules.keep_versions({}, kept)
    assert modules.versions_in(kept)[""] == {"version": 3}


class RefusedError(Exception):
    pass


class Refusing(modules.RefusesWrappers):
    def forward(self, x):
        return x

    def _refuse_wrapper(self, wrapper):
        raise RefusedError(wrapper)


def distributed(model, wrap=nn.parallel.DistributedDataParallel):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model.register_parameter("weight", nn.Parameter(torch.ones(1)))
        wrap(model)
    finally:
        dist.destroy_process_group()


def fully_sharded(model):
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def in_fsdp(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def adapted(model):
    peft = pytest.importorskip("peft")
    model.layer = nn.Linear(2, 2)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["layer"]))


def adapters_loaded(model):
    """As ``PeftModel.from_pretrained`` begins."""
    peft = pytest.importorskip("peft")
    model.layer = nn.Linear(2, 2)
    peft.PeftModel(model, peft.LoraConfig(target_modules=["layer"]))


def data_parallel(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        wrapped = nn.DataParallel(model)
    wrapped.device_ids = [0, 1]  # as where there are several
    wrapped(torch.ones(2))


def scripted(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.script(model)


@pytest.mark.parametrize(
    ("wrapper", "put_around"),
    [
        ("torch.compile", lambda model: torch.compile(model, backend="eager")(torch.ones(2))),
        ("DistributedDataParallel", distributed),
        ("DataParallel", lambda model: nn.parallel.replicate(model, [0])),
        ("DataParallel", data_parallel),
        ("FullyShardedDataParallel", lambda model: distributed(model, in_fsdp)),
        ("fully_shard", lambda model: distributed(model, fully_sharded)),
        ("DistributedDataParallel", lambda model: distributed(nn.Sequential(model))),
        ("FullyShardedDataParallel", lambda model: distributed(nn.Sequential(model), in_fsdp)),
        ("fully_shard", lambda model: distributed(nn.Sequential(model), fully_sharded)),
        ("peft", adapted),
        ("peft", adapters_loaded),
        ("torch.jit.script", scripted),
    ],
)
def test_wrappers_are_refused_before_they_do_anything(wrapper, put_around, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # for replicate
    try:
        put_around(Refusing())
    except RefusedError as error:
        assert error.args == (wrapper,)
    else:
        pytest.fail(f"{wrapper} no longer asks for what RefusesWrappers refuses it by")


def test_who_looks_at_all_attributes_is_no_wrapper():
    names = [name for name, _ in inspect.getmembers(Refusing())]
    assert "forward" in names
    assert not {"_initialize_hook", "_infer_parameters"} & {*names}


def test_forward_hooks_go_by_the_id_of_their_handle():
    model = net()
    handle = model.register_forward_hook(lambda *_: None)
    assert list(modules.forward_hooks_of(model)) == [handle.id], (
        "torch's modules have their forward hooks elsewhere: a hook that is added between steps "
        "would not lead to another recording"
    )


def test_cached_parametrizations_are_counted():
    assert not modules.caches_parametrizations()
    with torch.nn.utils.parametrize.cached():
        assert modules.caches_parametrizations(), (
            "torch counts the entries of parametrize.cached() elsewhere, which a recording refuses"
        )
    assert not modules.caches_parametrizations()


def test_hooks_of_all_modules_that_take_keyword_arguments():
    before, after = modules.hooks_around_all_modules()
    pre = of_all.register_module_forward_pre_hook(lambda module, args: None)
    takes = of_all.register_module_forward_hook(lambda *given: None, with_kwargs=True)
    plain = of_all.register_module_forward_hook(lambda *given: None)
    try:
        assert [*before] == [pre.id]
        assert [*after] == [takes.id, plain.id]
        assert modules.of_all_takes_kwargs(takes.id)
        assert not modules.of_all_takes_kwargs(plain.id)
    finally:
        for handle in (pre, takes, plain):
            handle.remove()
        of_all._global_forward_hooks_with_kwargs.pop(takes.id)  # torch leaves it


def test_own_hooks():
    model = net()
    assert not modules.has_hooks(model)
    handle = model.register_full_backward_hook(lambda *given: None)
    assert modules.has_hooks(model)
    handle.remove()
    assert not modules.has_hooks(model)


def test_what_functional_call_swaps_is_seen(monkeypatch: pytest.MonkeyPatch):
    owner, name = modules.SWAPS
    swap, seen = getattr(owner, name), []

    def swapped(accessor: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        result = swap(accessor, given, *args, **kwargs)
        seen.append((accessor.module, given, result[0]))
        return result

    monkeypatch.setattr(owner, name, swapped)
    model = net()
    own, other = model[0].weight, torch.ones(2, 2)
    torch.func.functional_call(model, {"0.weight": other}, (torch.ones(2, 2),))
    (module, given, before), (_, back, after) = seen
    assert module is model
    assert given["0.weight"] is other is after["0.weight"]
    assert before["0.weight"] is own is back["0.weight"]
