"""The calls of modules and functions that are under way in a recorded forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..._common.callsite import users_line
from ..._common.libraries import is_users
from ..._common.nested import leaves, tensors
from ..._common.progress import Progress
from ..._torch.modes import is_in_transform
from ..._torch.tensors import shape_of
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.tags import TAG, MicrobatchKey, Tag
from ..calls import UNRETURNED, Call, Flow
from ..recording import Recording
from ..segments import Segments, inbound
from .saved_tensors import Activations


class RecordedTag(Tag):
    """A tag that also holds the calls in which its tensor was made, and those that returned it.

    Args:
        key: the recording's run.
        hop: the hop that made the tensor.
        stage: the stage of that hop.
        calls: the calls that were under way.
        sources: the calls that returned the tensor, or those it was computed from between calls.
        segment: the index of the segment in which it was made.
    """

    __slots__ = (
        *("calls", "flow", "has_size_by_data", "is_read", "returned_by", "segment", "sources"),
    )

    def __init__(
        self,
        key: MicrobatchKey,
        hop: int,
        stage: int,
        calls: set[Call],
        sources: tuple[Call, ...],
        segment: int,
    ) -> None:
        super().__init__(key, hop, stage)
        self.calls = calls
        self.returned_by: set[Call] = set()
        self.sources = sources
        self.segment = segment
        self.flow: Flow | None = None
        self.is_read = False
        self.has_size_by_data = False


class CallsUnderWay:
    """The calls under way, from the outside in, and the arguments of each.

    Args:
        run: the run that is watched.
        result: the recording that each call is added to.
        segments: the segments; each call begins one.
        activations: the tensors that autograd saves.
        unhookable: paths of calls in which autograd allows no saved-tensor hooks.

    Attributes:
        compiled: paths of compiled modules.
        progress: shows each call that begins.
        failed_in: the innermost call that raised.
    """

    def __init__(
        self,
        run: MicrobatchRun,
        result: Recording,
        segments: Segments,
        activations: Activations,
        unhookable: Collection[str],
    ) -> None:
        self.unhookable = unhookable
        self.compiled: set[str] = set()
        self.progress: Progress | None = None
        self.failed_in: Call | None = None
        self._run = run
        self._result = result
        self._segments = segments
        self._activations = activations
        # A call's arguments are kept until it ends, so that no other tensor gets the id of one.
        self._stack: list[tuple[Call, set[int], object]] = []

    def __iter__(self) -> Iterator[Call]:
        """Iterate over the calls, from the outside in."""
        return (call for call, _, _ in self._stack)

    def with_arguments(self) -> Iterator[tuple[Call, set[int], object]]:
        """Iterate over the calls, each with the ids of its tensor arguments, and all arguments."""
        return iter(self._stack)

    def wrote(self, tensor: Tensor) -> None:
        """Note the calls that are under way and were given a tensor, to which, or to a copy of
        which on another device, they write."""
        for call, given, _ in self._stack:
            if id(tensor) in given:
                self._activations.written.add(id(call))

    def not_given(self, *tensors_: int) -> Iterator[Call]:
        """Return the calls whose arguments include none of these tensors, given by their ids."""
        return (call for call, given, _ in self._stack if given.isdisjoint(tensors_))

    def given_inside(self) -> set[int]:
        """Return the ids of the tensor arguments of calls inside of the model's own. Sealed calls
        among them have copies of these tensors."""
        return set().union(*(given for _, given, _ in self._stack[1:]))

    @property
    def innermost(self) -> Call | None:
        """The call whose own code is running."""
        return self._stack[-1][0] if self._stack else None

    def begin(
        self,
        path: str,
        kind: str,
        what: object,
        args: Any,
        why_closed: Iterable[str],
        *,
        is_function: bool,
    ) -> Call:
        """Write down that a call begins.

        Args:
            path: the path of the module, or the name of the function.
            kind: the name of the module's class.
            what: the module, or the function.
            args: all of its arguments.
            why_closed: reasons why no stage can begin with it.
            is_function: whether it is a function that is a block.
        """
        cursor = self._run.cursor
        call = Call(
            path,
            kind,
            self._run.cursor.count_call(what),
            len(self._stack),
            users_line(),
            parent=self.innermost,
            stage=cursor.stage,
            is_function=is_function,
            checkpoint=cursor.checkpoint,
            mark=cursor.mark.where if cursor.mark else None,
            mark_name=cursor.mark.name if cursor.mark else None,
        )
        given = list(tensors(args))
        call.inbound = inbound([getattr(getattr(t, TAG, None), "sources", ()) for t in given], call)
        if self.progress is not None:
            self.progress.step(path)
        self._segments.begin(len(self._result.calls), why_closed)
        self._result.calls.append(call)
        self._activations.given(call, given)
        if path in self.unhookable:
            self._activations.take_off()
            self.refuse("it uses torch.func, or other code that allows no saved-tensor hooks", call)
        ids = {id(t) for t in given} | {id(self._run.newest(t)) for t in given}
        self._stack.append((call, ids, args))
        return call

    def end(self, call: Call, result: Any) -> None:
        """Write down that the innermost call has ended."""
        _, _, args = self._stack.pop()
        if call.path in self.unhookable:
            self._activations.put_on()
        self._look_into_objects(call, args)
        call.under_way = False
        for index, tensor in enumerate(tensors(result)):
            call.outputs.append(shape_of(tensor))
            tag = getattr(tensor, TAG, None)
            if isinstance(tag, Tag) and tag.is_constant(tensor):
                call.constants.add(index)
            if isinstance(tag, RecordedTag):
                tag.returned_by.add(call)
                tag.sources = (call,)
        if call.hop is not None:
            call.stage = self._run.step.route[call.hop]

    def _look_into_objects(self, call: Call, args: object) -> None:
        """Open a call that was given an object of the user's with a tensor of another hop in it,
        which no argument is: data may have the call read that one."""
        objects = (leaf for leaf in leaves(args) if is_users(type(leaf).__module__))
        inside = (vars(o) for o in objects if hasattr(o, "__dict__") and not isinstance(o, Module))
        tags = (getattr(tensor, TAG, None) for tensor in tensors([*inside]))
        hops = {tag.hop for tag in tags if isinstance(tag, RecordedTag)}
        for around in (call, *call.ancestors()) if hops - {call.hop} else ():
            if not around.transforms:
                around.open("an object that it is given holds a tensor of another stage")

    def visit(self, hop: int, where: str) -> None:
        """Note that an operation runs on a hop, as a part of each of them."""
        is_transformed = is_in_transform()
        for call in self:
            call.transforms = call.transforms or is_transformed
            if call.hop is None:
                call.hop = hop
            elif call.last_hop != hop and call.last_hop is not None:
                call.open(f"it visits several stages ({where})")
            call.last_hop = hop

    def read_unreturned(self, tag: RecordedTag, where: str) -> None:
        """Note that a tensor is read that a call did not return, but left as state or in a list."""
        for call in tag.calls - tag.returned_by:
            if not call.under_way:
                call.leaves_to.add(self._run.stage)
                call.open(f"{UNRETURNED}, read at {where}")

    def read_ungiven(self, key: int, tensor: Tensor, tag: Tag, where: str) -> None:
        """Note that calls read a tensor that was made before them and did not come in by their
        arguments: when such a call is run again, it may be another micro-batch's.

        Args:
            key: the id of the tensor as the code knows it.
            tensor: its newest value.
            tag: the tag of that.
            where: the line.
        """
        inside = tag.calls if isinstance(tag, RecordedTag) else ()
        for call in self.not_given(key, id(tensor)):
            if call.refuses is None and call not in inside:
                call.refuses = f"it reads a tensor that it was not given ({where})"

    def refuse(self, why: str, call: Call | None = None) -> None:
        """Note that none of the calls can be run again, nor can a call that is about to begin."""
        for under_way in [*self, *([call] if call else [])]:
            under_way.refuses = why

    def why_closed(self) -> Iterator[str]:
        """Yield the reasons why no stage can begin inside of the calls."""
        for call in self:
            if call.path in self.compiled and not call.is_function:
                yield f"it is inside of compiled module {call.path or '(the model)'}"
            if call.path in self.unhookable:
                yield f"it is inside of {call.path or 'the model'}, which uses torch.func"


def is_made_by(tensor: Tensor, key: MicrobatchKey) -> bool:
    """Return whether a run made a tensor."""
    tag: Tag | None = getattr(tensor, TAG, None)
    return tag is not None and tag.key is key
