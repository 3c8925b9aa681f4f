"""``pipe(x)`` as a part of the caller's graph: two nodes that start and end the pipelined backward.

::

    inputs, witness ──► _Launch ──► phony ──► _Gather ──► _Outputs ──► … ──► loss
                          ▲                      │
                          └── run all backwards ◄┘ gradients, kept

``_Gather`` keeps the gradients of the outputs; ``_Launch`` runs the backwards. The phony between
them is a CPU tensor, so the engine runs ``_Launch`` in the thread that called ``backward()``: run
on a device's autograd thread it would wait for work that this very thread has to do.

The witness is one of the model's parameters. Without it the caller's graph would lead to none, and
a backward for parameters alone (``backward(inputs=…)``) would run neither node and silently leave
``.grad`` as it was; the witness leads it to an error. It is a parameter without hooks: an ordinary
backward comes to it as well, without a gradient, and would call them with ``None``. It takes 15 µs,
which is why there is only one: a backward for some parameters and not for this one is not found.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._common.nested import leaves, map_leaves
from .._common.threads.model_turns import alone_with
from .._common.threads.thread_state import ours
from .._torch.graph import at_end_of_backward, gradient_hooks, is_hooked, will_run
from ..batches.input_places import InputPlace
from ..batches.joining import JoinedLeaf
from ..crossing.tags import edge_of
from ..errors import UsageError
from ..restoring.restored_thread import leaves_intact
from .step import Step
from .step_state import StepState


class _Backward:
    """The backward of one forward; runs once."""

    def __init__(
        self,
        step: Step,
        joints: list[JoinedLeaf],
        inputs: list[tuple[Tensor, InputPlace]],
    ) -> None:
        self.step: Step | None = step
        self.joints = joints
        self.inputs = inputs
        self.gradients: dict[tuple[int, int | None], Tensor] = {}

    @leaves_intact
    def run(self) -> list[Tensor | None]:
        """Run all backwards; return the gradients of the inputs."""
        step, self.step = self.step, None
        if step is None:
            raise UsageError(
                "this pipelined forward has run its backward already: its graphs are gone; call "
                "the pipeline again, or use schedule='uncut' for retain_graph and second backwards"
            )
        with alone_with(step.request.model):
            self._add_roots(step.state)
            step.run_backward()
        return input_gradients(step.state, self.inputs)

    def _add_roots(self, state: StepState) -> None:
        """Send the gradients of the outputs to the hops where each micro-batch's were made."""
        for (leaf, part), gradient in self.gradients.items():
            joint = self.joints[leaf]
            pieces = (
                joint.gradients(gradient)
                if part is None
                else [gradient if i == part else None for i in range(len(joint.places))]
            )
            for (m, at), piece in zip(joint.places, pieces, strict=True):
                result = state.results[m]
                assert result is not None
                place = result.edges[at]
                if piece is not None and place is not None:
                    hop, edge = place
                    stage = state.request.prepared.route[hop]
                    on_host = result.on_host[at]
                    sent = state.context.send(piece, stage, back=True, on_host=on_host)
                    state.context.lent.add(None, sent)
                    state.runs[m].add_sent_root(hop, edge, sent)
        self.gradients.clear()
        self.joints = []


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way_back: _Backward, token: Tensor, witness: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        ctx.way_back = way_back
        ctx.witness = witness
        ctx.token = edge_of(token).node  # runs in an ordinary backward, and in no other
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        if not will_run(ctx.token):
            raise UsageError(
                "autograd.grad, or backward(inputs=…), asks for some gradients, but a pipelined "
                "backward adds all of them up in .grad; call backward() and read .grad, or use "
                "schedule='uncut'"
            )
        with ours():
            gradients = ctx.way_back.run()
            if ctx.witness is not None:
                _leave_uncalled(gradient_hooks(ctx.witness) or {})
            return None, None, None, *gradients


def _leave_uncalled(hooks: dict[int, Any]) -> None:
    """Let the engine call none of the hooks that the witness has got since the forward: it comes
    with no gradient. They are put back at the end, and are not lost if something fails before."""
    given = dict(hooks)
    hooks.update({key: partial(_called_with, hook) for key, hook in given.items()})

    def put_back() -> None:
        hooks.update({key: hook for key, hook in given.items() if key in hooks})

    if given:
        at_end_of_backward(put_back)


def _called_with(hook: Callable[[Tensor], Any], gradient: Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        way_back: _Backward,
        places: list[tuple[int, int | None]],
        phony: Tensor,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way_back, ctx.places = way_back, places
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True goes through a pipelined backward, which is cut at every "
                "crossing; use schedule='uncut' for higher derivatives"
            )
        for place, gradient in zip(ctx.places, gradients, strict=True):
            if gradient is not None:
                ctx.way_back.gradients[place] = gradient
        return None, None, torch.zeros((), device="cpu"), *(None for _ in gradients)


class _Output(torch.autograd.Function):
    """Stands behind one of several outputs, so that one without a gradient has its hooks not called
    where ``_Gather`` runs for the others."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def attach(
    output: Any,
    joints: list[JoinedLeaf],
    step: Step,
    inputs: list[tuple[Tensor, InputPlace]],
) -> Any:
    """Return the joined output with a gradient path back through the pipeline.

    Args:
        output: as it was joined, without a graph.
        joints: how each leaf was joined.
        step: its forwards have run.
        inputs: those that need grad, and which micro-batches have which parts of them.
    """
    way_back = _Backward(step, joints, inputs)
    places: list[tuple[int, int | None]] = []
    for leaf, joint in enumerate(joints):
        found = [(step.state.results[m], at) for m, at in joint.places]
        edges = [result.edges[at] for result, at in found if result is not None]
        if joint.how == "list":
            places += [(leaf, i) for i, edge in enumerate(edges) if edge is not None]
        elif any(edge is not None for edge in edges):
            places.append((leaf, None))
    if not places:
        return output
    token = torch.zeros((), device="cpu", requires_grad=True)
    witness = _witness(step.request.model)
    phony = _Launch.apply(way_back, token, witness, *(t for t, _ in inputs))
    flat: dict[int, Any] = dict(enumerate(_leaves_by_joint(output, joints)))
    values = [flat[leaf] if part is None else flat[leaf][part] for leaf, part in places]
    attached = _Gather.apply(way_back, places, phony, *values)
    if len(attached) > 1:
        attached = [*map(_Output.apply, attached)]
    for (leaf, part), value in zip(places, attached, strict=True):
        if part is None:
            flat[leaf] = value
        else:
            flat[leaf][part] = value
    new = iter(flat.values())
    return _with_joints(output, joints, new)


def _witness(model: nn.Module) -> Tensor | None:
    """Return a trained parameter without hooks, if there is one."""
    trained = (p for p in model.parameters() if p.requires_grad and p.is_leaf)
    return next((p for p in trained if not is_hooked(p, edge_of(p).node)), None)


def _leaves_by_joint(output: Any, joints: list[JoinedLeaf]) -> list[Any]:
    rest = iter(leaves(output))
    found = []
    for joint in joints:
        if joint.how == "list":
            found.append([next(rest) for _ in joint.parts])
        else:
            found.append(next(rest))
    return found


def _with_joints(output: Any, joints: list[JoinedLeaf], new: Any) -> Any:
    flat = iter(
        [
            item
            for joint, value in zip(joints, new, strict=True)
            for item in (value if joint.how == "list" else [value])
        ]
    )
    return map_leaves(lambda _: next(flat), output)


def input_gradients(
    state: StepState, inputs: list[tuple[Tensor, InputPlace]]
) -> list[Tensor | None]:
    """Return the gradients of the inputs: those of the micro-batches' parts put together, or
    summed for an input that goes whole to each micro-batch."""
    result: list[Tensor | None] = []
    for tensor, place in inputs:
        parts = [state.runs[m].input_gradients.get(leaf) for m, leaf in place.leaves.items()]
        parts = [p if p is None else p.to(tensor.device) for p in parts]
        if all(part is None for part in parts):
            result.append(None)
        elif place.dim is None:
            given = [part for part in parts if part is not None]
            result.append(sum(given[1:], given[0]))
        else:
            pieces = tensor.detach().split([b.size for b in state.request.microbatches], place.dim)
            result.append(
                torch.cat(
                    [
                        torch.zeros_like(piece) if part is None else part
                        for part, piece in zip(parts, pieces, strict=True)
                    ],
                    place.dim,
                )
            )
    return result
