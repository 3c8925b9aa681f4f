"""A plan as marks: lines of Python to paste into the code that builds the model.

A mark belongs to a module and counts at each of its calls; an entry of a plan belongs to one call.
So not every plan can be written as marks: where a module is called on several stages, its mark
would move the forward at each of these calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from keyword import iskeyword

from torch import nn

from .._common.text import one_line
from .._torch.modules import children_of
from ..recording.calls import Call
from ..recording.plan_resolution import attached_plans
from ..stages.marks import mark_of


def expression(model: nn.Module, path: str, name: str = "model") -> str:
    """Return a Python expression for a module of a model.

    Args:
        model: the model.
        path: the module's path, as in ``named_modules``; ``""`` is the model itself.
        name: the name of the model's variable.

    Example:
        >>> expression(nn.Sequential(nn.ModuleDict({"a b": nn.ReLU()})), "0.a b")
        "model[0]['a b']"
    """
    module = model
    for part in filter(None, path.split(".")):
        children = list(children_of(module))
        if isinstance(module, nn.Sequential | nn.ModuleList) and _is_index(part, children):
            name += f"[{part}]"
        elif isinstance(module, nn.ModuleDict):
            name += f"[{part!r}]"
        elif part.isidentifier() and part.isascii() and not iskeyword(part):
            # Python normalizes other identifiers, to ones that look alike.
            name += f".{part}"
        else:
            name = f"{name}.get_submodule({part!r})"
        module = module.get_submodule(part)
    return name


def _is_index(part: str, children: Sequence[str]) -> bool:
    """Return whether a child's name is its position: a Sequential may have others."""
    return part in map(str, range(len(children))) and children[int(part)] == part


def marks_text(
    model: nn.Module,
    calls: Sequence[Call],
    begins: Sequence[Sequence[Call]],
    stages: Mapping[tuple[str, int], int],
    in_code: Sequence[str],
) -> str:
    """Return the lines; those for stages that no mark can begin are comments.

    Args:
        model: the model with the marks that it has now.
        calls: all calls of its forward.
        begins: for each stage from the second on, the calls that begin it: one of them is marked.
        stages: the stage of each call, by its path and number.
        in_code: the lines of marks in the forward's own code.
    """
    lines, impossible = [], []
    for stage, candidates in enumerate(begins, 1):
        found = next((c for c in candidates if _can_be_marked(c, calls, stages)), None)
        if found is None:
            call = candidates[0]
            impossible.append(
                f"# stage {stage} begins with call {call.call} of {one_line(call.path)}, whose "
                "other calls are on other stages: a mark would count at each of them"
            )
            continue
        written = expression(model, found.path)
        # BeginBlock marks the module itself, so the assignment may be left out where it is no name.
        target = "" if written.endswith(")") else f"{written} = "
        lines.append(f"{target}bp.BeginBlock({written}, stage={stage})")
    if impossible:
        impossible.append("# so pass the plan itself: bp.Pipeline(model, plan=plan)")
        return "\n".join([*impossible, *(f"# {line}" for line in lines)])
    if any(mark_of(module) is not None for module in model.modules()):
        lines.insert(0, "bp.remove_blocks(model)")
    lines[:0] = [  # stages that are set would override the marks
        f"bp.reset_pipeline_stage_assignment({expression(model, path)})"
        for path, _ in attached_plans(model)
    ]
    notes = [f"# remove the mark at {one_line(where)}: it would count too" for where in in_code]
    return "\n".join([*notes, *lines])


def _can_be_marked(
    call: Call, calls: Sequence[Call], stages: Mapping[tuple[str, int], int]
) -> bool:
    """Return whether this is its module's first call, and all others are on its stage."""
    stage = stages[call.path, call.call]
    others = [stages[c.path, c.call] for c in calls if c.path == call.path and c.is_module]
    return call.call == 0 and all(other == stage for other in others)
