"""Nested values: what is in them, by which names, and the same with other leaves."""

import copy
import os
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpipe._common.nested import leaf_names, leaves, map_leaves, map_tensors, tensors

from ..stage_devices import examples


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Record:
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    only: Any


plain = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.booleans())
tensor_leaves = st.builds(torch.full, st.just((2,)), st.floats(0, 1))
nested = st.recursive(
    st.one_of(plain, tensor_leaves),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(MappingProxyType),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Frozen, inner),
    ),
    max_leaves=8,
)


def containers(value: Any) -> list[type]:
    """The types of everything in it that has members, from the outside in."""
    if isinstance(value, tuple | list):
        members = list(value)
    elif isinstance(value, OrderedDict | dict | MappingProxyType):
        members = list(value.values())
    elif isinstance(value, Record | Frozen):
        members = list(vars(value).values())
    else:
        return []
    return [type(value), *(kind for member in members for kind in containers(member))]


@settings(max_examples=examples(200))
@given(nested)
def test_leaf_names_evaluate_to_the_leaves(value: Any) -> None:
    """Each name is a Python expression that leads to its leaf, in the order of the leaves."""
    names = leaf_names(value)
    found = [eval(name, {"output": value}) for name in names]
    assert len(set(names)) == len(names)
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in leaves(value)]


@settings(max_examples=examples(200))
@given(nested)
def test_map_leaves_keeps_kinds_order_and_the_original(value: Any) -> None:
    """Only leaves are others; the value itself is as it was."""
    before = list(leaves(value))
    found = map_leaves(lambda leaf: lambda: leaf, value)  # a function is a leaf, and a new one
    assert [leaf() for leaf in leaves(found)] == before
    assert containers(found) == containers(value)
    assert leaf_names(found) == leaf_names(value)
    assert [id(leaf) for leaf in leaves(value)] == [id(leaf) for leaf in before]


@settings(max_examples=examples(200))
@given(nested)
def test_what_does_not_change_comes_back_itself(value: Any) -> None:
    """A module that is handed a list may append to it."""
    assert map_leaves(lambda leaf: leaf, value) is value
    assert map_tensors(lambda tensor: tensor, value) is value


@settings(max_examples=examples(200))
@given(nested)
def test_map_tensors_changes_tensors_alone(value: Any) -> None:
    """All of them, in order; other leaves stay the same objects."""
    found = map_tensors(lambda tensor: tensor + 1, value)
    assert [t.tolist() for t in tensors(found)] == [(t + 1).tolist() for t in tensors(value)]
    others = [[id(x) for x in leaves(v) if not isinstance(x, torch.Tensor)] for v in (value, found)]
    assert others[0] == others[1]


def test_a_container_beside_a_changed_one_stays_itself() -> None:
    """What is rebuilt is what holds a changed leaf, and nothing else."""
    kept, changed = [1, Pair(2, 3)], [torch.ones(1)]
    found = map_tensors(torch.neg, {"kept": kept, "changed": changed})
    assert found["kept"] is kept
    assert found["changed"][0].tolist() == [-1]
    assert changed[0].tolist() == [1]


def test_a_container_of_a_class_of_ones_own_keeps_its_attributes() -> None:
    """A Hugging Face output is a mapping with more than its items."""

    class Output(OrderedDict):
        pass

    output = Output(logits=torch.ones(1))
    output.note = "kept"
    found = map_tensors(torch.neg, output)
    assert type(found) is Output
    assert found.note == "kept"
    assert copy.copy(output)["logits"].tolist() == [1]


def test_a_mapping_that_refuses_some_keys_is_walked() -> None:
    """As ``os.environb`` does, a typed registry may refuse to be asked for the name of one of its
    attributes."""

    class Typed(dict[int, Any]):
        def __contains__(self, key: object) -> bool:
            if not isinstance(key, int):
                raise TypeError(key)
            return super().__contains__(key)

    typed = Typed({1: torch.ones(1)})
    typed.best = torch.zeros(1)  # type: ignore[attr-defined]
    assert [t.tolist() for t in tensors(typed)] == [[1], [0]]
    assert [*leaves(os.environb)] == [*os.environb.values()]
