"""Source of models that keep state: one place sets it, another one reads it, each under a condition.

They are text, because what a branch would do that is not taken is read from the source.
"""

import importlib.util
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hypothesis import strategies as st

STAGES = 3


@dataclass(frozen=True)
class Kind:
    """A kind of state of an object ``o``: how it is made, set to a number ``v``, and read."""

    made: str
    sets: tuple[str, ...]
    reads: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "attribute": Kind(
        "self.s = 0.0", ("o.s = v", "setattr(o, 's', v)"), ("o.s", "getattr(o, 's')")
    ),
    "object": Kind(
        "self.held = types.SimpleNamespace(s=0.0)",
        ("o.held.s = v", "held = o.held; held.s = v", "vars(o.held).update(s=v)"),
        ("o.held.s", "vars(o.held)['s']"),
    ),
    "own object": Kind("self.held = Held()", ("o.held.set(v)",), ("o.held.s", "o.held.get()")),
    "entry": Kind(
        "self.table = {'k': 0.0}",
        ("o.table['k'] = v", "o.table.update(k=v)", "table = o.table; table['k'] = v"),
        ("o.table['k']", "o.table.get('k', 0.0)", "sum(o.table.values())"),
    ),
    "new entry": Kind(
        "self.table = {}",
        ("o.table['k'] = v", "o.table.setdefault('k', []).append(v)", "o.table |= {'k': v}"),
        ("(0.1 if 'k' in o.table else 0.0)", "len(o.table)"),
    ),
    "other table": Kind(
        "self.table = {'k': 0.0}",
        ("o.table = {'k': v}", "o.table = dict(k=v)", "o.table = {**o.table, 'k': v}"),
        ("o.table['k']", "o.table.get('k')", "next(iter(o.table.values()))"),
    ),
    "element": Kind(
        "self.items = [0.0, 1.0]",
        ("o.items[0] = v", "o.items[:1] = [v]", "o.items.insert(0, v)"),
        ("o.items[0]", "sum(o.items)", "max(o.items)"),
    ),
    "list": Kind(
        "self.items = [0.0]",
        ("o.items.append(v)", "o.items += [v]", "o.items = [*o.items, v]"),
        ("o.items[-1]", "0.1 * len(o.items)", "sum(o.items)"),
    ),
    "deque": Kind(
        "self.items = collections.deque([0.0], maxlen=3)",
        ("o.items.append(v)", "o.items.appendleft(v)"),
        ("o.items[-1]", "sum(o.items)"),
    ),
    "global": Kind("", ("set_global(v)", "GLOBALS['k'] = v"), ("SCALE + GLOBALS['k']",)),
    "class attribute": Kind("", ("Net.s = v", "type(o).s = v"), ("Net.s", "o.s")),
    "closure": Kind("self.set, self.get = closure()", ("o.set(v)",), ("o.get()",)),
    "array": Kind(
        "self.array = np.zeros(2)",
        ("o.array[0] = v", "o.array.fill(v)"),
        ("o.array[0]", "o.array.sum()"),
    ),
    "tensor": Kind(
        "self.t = torch.zeros(())", ("o.t = torch.tensor(v)", "o.t.fill_(v)"), ("o.t.item()", "o.t")
    ),
    "buffer": Kind(
        "self.register_buffer('b', torch.zeros(2))",
        (
            "o.b.fill_(v)",
            "o.b[0] = v",
            "o.b.mul_(0.5).add_(v)",
            "o.b.data.fill_(v)",
            "o.b = o.b + v",
        ),
        ("o.b.sum()", "o.b[0]", "o.b.detach().clone()[0]"),
    ),
    "mode": Kind(
        "self.drop = nn.Identity()",
        ("o.drop.train(v > 0)",),
        ("(0.2 if o.drop.training else 0.1)",),
    ),
}

CONDITIONS: Mapping[str, str] = {
    "always": "{code}",
    "input": "if x.mean() > 0:\n    {code}",
    "item": "if h.mean().item() > limit:\n    {code}",
    "variable": "is_wild = bool((x.mean() > 0).item())\nif is_wild:\n    {code}",
    "and": "if self.training and x.mean() > 0:\n    {code}",
    "count": "self.calls_{place} += 1\nif self.calls_{place} % 7 == 6:\n    {code}",
    "else": "if x.mean() <= 0:\n    pass\nelse:\n    {code}",
    "method": "if self.is_wild(x):\n    {code}",
    "match": "match bool(x.mean() > 0):\n    case True:\n        {code}",
    "loop": "for _ in range(int(x.mean() > 0)):\n    {code}",
    "while": "left = int(x.mean() > 0)\nwhile left:\n    {code}\n    left -= 1",
    "error": "try:\n    check(x)\nexcept ValueError:\n    {code}",
    "eval": "if not self.training:\n    {code}",
}

# What a stage does to ``h`` with what ``{read}`` gives; the code around it has ``o``.
READS: Mapping[str, str] = {
    "plain": "o = self; h = h * (1 + {read})",
    "variable": "o = self; by = {read}; h = h + by",
    "method": "h = self.scaled(h)",
    "function": "h = scaled(self, h)",
    "module": "h = self.reader(h)",
    "module of a list": "h = functools.reduce(lambda h, layer: layer(h), self.readers, h)",
    "property": "h = h * (1 + self.factor)",
    "comprehension": "o = self; h = sum(h * (1 + {read}) for _ in range(2))",
    "context": "with Scope(self) as scope: h = h * (1 + scope.by)",
    "table of layers": "h = self.by_name['read'](h)",
    "hook": "o = self; h.register_hook(lambda g: g * (1 + {read}))",
    "hook of a method": "h.register_hook(self.scaled)",
    "partial hook": "h.register_hook(functools.partial(scaled, self))",
    "made hook": "h.register_hook(make_hook(self))",
    "checkpoint": "h = checkpoint(self.scaled, h, use_reentrant=False)",
    "checkpointed module": "h = checkpoint(self.reader, h, use_reentrant=False)",
    "custom function": "h = Scaled.apply(h, self)",
    "saved tensors": "with saved_tensors_hooks(lambda t: t, lambda t: scaled(self, t)): h = h * h.tanh()",
    "node": "h = h * 1.0; h.grad_fn.register_prehook(lambda gs: (scaled(self, gs[0]),))",
}
SETS: Mapping[str, str] = {
    "plain": "o, v = self, h.detach().mean().item(); {set}",
    "count": "self.n += 1; o, v = self, 0.1 * self.n; {set}",
    "constant": "o, v = self, 0.3; {set}",
    "method": "self.keep(h)",
    "function": "keep(self, h)",
    "module": "h = self.keeper(h)",
    "decorated": "keep_decorated(self, h)",
    "comprehension": "[keep(self, one) for one in (h,)]",
    "hook": "h.register_hook(lambda g: keep(self, g))",
    "context": "with Keeping(self, h): h = h * 1.0",
    "custom function": "h = Kept.apply(h, self)",
    "no_grad": "with torch.no_grad(): keep(self, h.detach())",
}

_SOURCE = """
import collections, contextlib, functools, types
import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
import blockpipe as bp

GLOBALS, SCALE = {{"k": 0.0}}, 0.0

def set_global(v):
    global SCALE
    SCALE = v

def closure():
    s = 0.0
    def set(v):
        nonlocal s
        s = v
    return set, lambda: s

class Held:
    def __init__(self):
        self.s = 0.0
    def set(self, v):
        self.s = v
    def get(self):
        return self.s

def check(x):
    if x.mean() > 0:
        raise ValueError

def read_of(o):
    return {read}

def scaled(o, h):
    return h * (1 + {read})

def make_hook(o):
    def hook(g):
        return g * (1 + {read})
    return hook

def keep(o, h):
    v = h.detach().mean().item()
    {set}

def noted(function):
    @functools.wraps(function)
    def called(*args):
        return function(*args)
    return called

@noted
def keep_decorated(o, h):
    keep(o, h)

class Scope:
    def __init__(self, o):
        self.o = o
    def __enter__(self):
        o = self.o
        self.by = {read}
        return self
    def __exit__(self, *_):
        pass

class Keeping:
    def __init__(self, o, h):
        self.o, self.h = o, h
    def __enter__(self):
        pass
    def __exit__(self, *_):
        keep(self.o, self.h)

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, h, o):
        context.o = o
        return h.clone()
    @staticmethod
    def backward(context, g):
        return scaled(context.o, g), None

class Kept(torch.autograd.Function):
    @staticmethod
    def forward(context, h, o):
        keep(o, h)
        return h.clone()
    @staticmethod
    def backward(context, g):
        return g, None

class Reader(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.owner = [o]
    def forward(self, h):
        o = self.owner[0]
        return h * (1 + {read})

class Keeper(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.owner = [o]
    def forward(self, h):
        keep(self.owner[0], h)
        return h * 1.0

class Net(nn.Module):
    s = 0.0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range({stages}))
        self.calls_read = self.calls_set = self.n = 0
        self.reader, self.keeper = Reader(self), Keeper(self)
        self.readers = [Reader(self)]
        self.by_name = {{"read": Reader(self), "other": nn.Identity()}}
        {made}

    def is_wild(self, x):
        return bool(x.mean() > 0)

    def scaled(self, h):
        return scaled(self, h)

    def keep(self, h):
        keep(self, h)

    @property
    def factor(self):
        o = self
        return {read}

    def loss(self, output, target):
        return (output - target).square().mean()

    def forward(self, x):
        h, limit = x, 0.0
{body}
        return h
"""


@dataclass(frozen=True)
class StatefulProgram:
    """A model that keeps one kind of state.

    Attributes:
        kind: the name of the kind.
        set, read: how that is set, and read.
        places: how the stage does so: a name of ``SETS``, and one of ``READS``.
        conditions: when, of ``CONDITIONS``: for the set, and the read.
        stages: on which stage.
        is_set_first: whether it is set before it is read, on one stage.
    """

    kind: str
    set: str
    read: str
    places: tuple[str, str]
    conditions: tuple[str, str]
    stages: tuple[int, int]
    is_set_first: bool

    @property
    def source(self) -> str:
        sets = _under(self.conditions[0], "set", SETS[self.places[0]].format(set=self.set))
        reads = _under(self.conditions[1], "read", READS[self.places[1]].format(read=self.read))
        body = []
        for stage in range(STAGES):
            own = [(self.stages[0], sets), (self.stages[1], reads)][
                :: 1 if self.is_set_first else -1
            ]
            lines = [f"h = self.layers[{stage}](h).tanh()", *(c for at, c in own if at == stage)]
            inner = textwrap.indent("\n".join(lines), "    ")
            body.append(textwrap.indent(f"with bp.Block(stage={stage}):\n{inner}", " " * 8))
        made = KINDS[self.kind].made or "pass"
        parts = {"read": self.read, "set": self.set, "made": made, "stages": STAGES}
        return _SOURCE.format(body="\n".join(body), **parts)


def _under(condition: str, place: str, code: str) -> str:
    lines = code.split("; ") if "; " in code and "with" not in code else [code]
    frame = CONDITIONS[condition].replace("{place}", place)
    indent = next(line for line in frame.split("\n") if "{code}" in line).partition("{")[0]
    return frame.replace("{code}", f"\n{indent}".join(lines))


@st.composite
def stateful_programs(draw: st.DrawFn) -> StatefulProgram:
    name = draw(st.sampled_from([*KINDS]))
    kind = KINDS[name]
    return StatefulProgram(
        name,
        draw(st.sampled_from(kind.sets)),
        draw(st.sampled_from(kind.reads)),
        (draw(st.sampled_from([*SETS])), draw(st.sampled_from([*READS]))),
        (draw(st.sampled_from([*CONDITIONS])), draw(st.sampled_from([*CONDITIONS]))),
        (draw(st.integers(0, STAGES - 1)), draw(st.integers(0, STAGES - 1))),
        draw(st.booleans()),
    )


_numbers = itertools.count()


def imported(source: str, folder: Path) -> ModuleType:
    """Return a module with some source, which has a file of its own."""
    path = folder / f"stateful_{next(_numbers)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
