"""A run: one micro-batch's trip along the route, forward and back.

A run answers one question for the glue: *may this tensor be read here?* A tensor made on this
hop may. One made on another hop is imported: a copy on this hop's device, cut from the graph it
came from, whose gradient is carried back when this hop's backward has run. So every (hop,
micro-batch) has a small graph of its own, and its backward is an action like any other.

Same gradients, to the bit (design rule 1): a tensor read on several hops is imported from the
*previous* hop that read it, so that the later hop's partial sum enters the earlier hop's backward
as one more root gradient, and sums come about in the plain run's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from .._common.callsite import users_line
from .._common.nested import map_tensors, tensors
from .._common.thread_state import ours
from .._torch.modes import is_transformed
from .._torch.tensors import version_of
from ..devices.copies import PendingCopy
from ..devices.copy_lifetimes import CopySources, ReadCopies
from ..devices.devices import mark
from ..devices.observer import Watch
from ..devices.ownership import Owner, owner_of, set_owner
from ..devices.rng_streams import torchs_of
from ..errors import CrossingError, RouteError, StateError
from ..stages.marks import Cursor
from .hop_backward import WeightPart, run_input_part, run_whole
from .offload import Offload
from .recompute import RecomputedCall, RecomputeSpec
from .tags import (
    RECORDING,
    TAG,
    UNCUT,
    Aliases,
    Crossing,
    GradientSlot,
    HopGraph,
    Import,
    MicrobatchKey,
    ParameterHome,
    StepContext,
    Tag,
    aliases_of,
    edge_of,
    enter_graph,
    set_aliases,
)
from .tensor_attributes import class_attributes, share_attributes

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]
Reader = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ForwardPosition:
    """Where a run is in its forward: its hop, and what was called how many times."""

    hop: int
    stage: int
    cursor: Cursor
    calls: dict[int, int]


class MicrobatchRun:
    """One micro-batch under way.

    Args:
        step: what it shares with the others.
        microbatch: its index.
        cursor: where the marks of its forward move.
    """

    def __init__(self, step: StepContext, microbatch: int, cursor: Cursor) -> None:
        self.step = step
        self.key = MicrobatchKey(step.number, microbatch)
        self.microbatch = microbatch
        self.cursor = cursor
        self.hop = -1
        self.stage = -1
        self.sealed = 0  # how many sealed modules the forward is inside of
        self.graphs: dict[int, HopGraph] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self.on_border: Callable[[int, int], None] | None = None
        self.hooked: set[int] = set()  # hops whose graphs have hooks on activations
        self.wrote_foreign = False  # whether any foreign tensor was written to
        self.recomputes = False  # whether what this micro-batch saves is dropped, and made again
        self.recomputed_calls: dict[int, list[RecomputedCall]] = {}  # by hop: what is recomputed
        self.offload: Offload | None = None  # what is in host memory meanwhile
        self._left: dict[int, torch.Event | None] = {}  # by hop: what was made there is there
        self._lent = CopySources()  # by hop: what other hops are copying
        self._taken = ReadCopies()  # by hop: copies that it reads
        self._home_imports: dict[int, dict[int, Import]] = {}
        self._weights: dict[int, WeightPart] = {}
        self._calls: dict[int, int] = {}
        self._foreign: list[tuple[Tensor, Import]] = []  # of the operation under way
        self._outside: list[tuple[Tensor, int]] = []  # what else it reads that nobody made here
        # This hop's imports: a write may reach one through a view of it, with no import in sight.
        self._hop_imports: list[tuple[weakref.ref[Tensor], weakref.ref[Import]]] = []
        self._marks = 0
        self.on_arrival: list[Callable[[int], None]] = []  # told the stage, behind a border
        cursor.on_move = self._marked

    # --- where the run is

    def arrive(self) -> int:
        """Be on the hop that the cursor asks for; crosses the border if it moved."""
        if self.cursor.stage != self.stage:
            if self.sealed:
                raise RouteError(
                    f"micro-batch {self.microbatch} moved to stage {self.cursor.stage} inside a "
                    f"module that stayed on stage {self.stage} when it was recorded "
                    f"({users_line()}); give Pipeline a sample that takes this way"
                )
            self._cross(self.next_hop(self.cursor.stage))
        return self.hop

    def next_hop(self, stage: int) -> int:
        """The index of the next hop of the route on a stage; the recording makes new ones."""
        route = self.step.route
        for hop in range(self.hop + 1, len(route)):
            if route[hop] == stage:
                return hop
        raise RouteError(
            f"micro-batch {self.microbatch} goes to stage {stage} after "
            f"{route[: self.hop + 1]}, but the recorded route is {route} and has no stage {stage} "
            f"after that ({users_line()}); it may skip hops, but not add or reorder them: "
            "give Pipeline a sample that takes the longest way"
        )

    def is_sealed(self, hops: frozenset[int]) -> bool:
        """Whether a module that is sealed on these hops runs untouched where it is called now."""
        hop = self.hop
        if self.cursor.stage != self.stage:
            hop = self.next_hop(self.cursor.stage)
        return hop in hops

    def count_call(self, what: object) -> int:
        """How many times this was called before in this run."""
        count = self._calls.get(id(what), 0)
        self._calls[id(what)] = count + 1
        return count

    def position(self) -> ForwardPosition:
        """Where it is, for another run to go on from."""
        return ForwardPosition(self.hop, self.stage, self.cursor.copy(), dict(self._calls))

    def resume_at(self, position: ForwardPosition) -> None:
        """Be where another run was; the cursor is there already, and moves nobody at once."""
        self.hop, self.stage = position.hop, position.stage
        self._calls = dict(position.calls)
        self.cursor.on_move = None

    def forget_calls(self) -> None:
        """Count calls from 0 again: the model's forward begins anew."""
        self._calls.clear()

    def _marked(self, stage: int) -> None:
        """A mark asks for a stage. Where the recording had a hop begin with this very mark, wait
        for the turn at once: the user's code may read its own state before its first operation."""
        self._marks += 1
        following = self.hop + 1
        begins = self.step.begins
        if stage != self.stage and (
            self.sealed
            or (
                following < len(begins)
                and begins[following] == self._marks
                and self.step.route[following] == stage
            )
        ):
            with ours():
                self.arrive()

    def _cross(self, hop: int) -> None:
        self.notice_writes()
        self._hop_imports.clear()
        before = self.hop
        if before >= 0:
            self._left[before] = self.step.mark(self.stage)
        self.hop, self.stage = hop, self.cursor.stage
        if self.on_border is not None:
            self.on_border(before, hop)
        for arrived in self.on_arrival:
            arrived(self.stage)

    # --- what may be read here

    def local(self, tensor: Tensor) -> Tensor:
        """What an operation on this hop gets in the place of a tensor."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None:
            return self._local_untagged(tensor)
        while tag.newest is not None:
            tensor = tag.newest
            tag = cast(Tag, getattr(tensor, TAG))
        if tag.key is not self.key:
            return self._of_another(tensor, tag)
        if self.wrote_foreign:
            self._check_current(tensor, tag)
        if tag.hop == self.hop:
            return tensor
        return self._imported(tensor, tag)

    def _local_untagged(self, tensor: Tensor) -> Tensor:
        home = self.step.home_of(tensor)
        if home is not None:
            return self._at_home(tensor, home)
        if is_transformed(tensor):
            return tensor  # inside a torch.func transform, which stays on its stage
        if tensor.requires_grad and self.step.differentiable:
            if tensor.grad_fn is not None:
                raise CrossingError(
                    f"an operation on stage {self.stage} (micro-batch {self.microbatch}) reads a "
                    f"tensor of shape {tuple(tensor.shape)} that has a gradient path, but was made "
                    f"outside of this forward or behind Blockpipe's back ({users_line()}); compute "
                    f"it inside the forward with torch operations, detach it, or {UNCUT}"
                )
            return self._at_home(tensor, self.step.adopt(tensor, self.hop, self.stage))
        return self._constant(tensor)

    def _constant(self, tensor: Tensor) -> Tensor:
        device = self.step.device_of(self.stage)
        isolate_as = self.step.isolate_as
        if isolate_as is not None:
            here, owner = Owner(isolate_as, self.stage), owner_of(tensor)
            if owner is None or owner.pipeline != isolate_as:
                set_owner(tensor, here)
            if owner is None or owner.pipeline != isolate_as or owner == here:
                return self._from_outside(tensor)
        elif device is None or tensor.device == device or self.stays(tensor):
            return self._from_outside(tensor)
        elif tensor.is_meta:  # only its shape counts, as of torch's dummy behind nested tensors
            return tensor
        value = self.step.lend(tensor, self.stage, on_host=self.stays(tensor)).receive()
        self._foreign.append((tensor, Import(value, False, version_of(value))))
        return value

    def _from_outside(self, tensor: Tensor) -> Tensor:
        """It is nobody's: only what is written to it makes it this micro-batch's."""
        self._outside.append((tensor, version_of(tensor)))
        return tensor

    def _at_home(self, tensor: Tensor, home: ParameterHome) -> Tensor:
        if home.hop == self.hop:
            return self._followed(tensor) if home.is_adopted else tensor
        if home.stage == self.stage and not (tensor.requires_grad and self.step.differentiable):
            return tensor
        if home.hop > self.hop and tensor.requires_grad and self.step.differentiable:
            raise RouteError(
                f"micro-batch {self.microbatch} reads {home.name!r} on stage {self.stage}, earlier "
                f"than recorded (first on stage {home.stage}; {users_line()}); give Pipeline a "
                "sample that takes the longest way"
            )
        imports = self._home_imports.setdefault(id(tensor), {})
        found = imports.get(self.hop)
        if found is None:
            if home.stage == self.stage and not self.step.isolate:
                value = tensor
            else:
                watch, on_host = self._watch(tensor, home.hop, self.hop), self.stays(tensor)
                value = self.step.copy_of(tensor, self.stage, watch, on_host=on_host)
            found = self._enter(tensor, value, imports, home.hop)
            self.note_import(tensor, home.hop, home.name)
        found.share_attributes(tensor)
        self._foreign.append((tensor, found))
        return found.value

    def _followed(self, leaf: Tensor) -> Tensor:
        """A leaf from outside that needs a gradient, on the first hop that reads it. From another
        accelerator it is brought by an operation of this hop's graph, where later hops send their
        gradients."""
        device = self.step.device_of(self.stage)
        if device is None or leaf.device == device or self.stays(leaf):
            return leaf
        imports = self._home_imports.setdefault(id(leaf), {})
        found = imports.get(self.hop)
        if found is None:
            with torch.enable_grad():  # a later reader may need the gradient
                value = leaf.to(device)
            found = imports[self.hop] = Import(value, True, version_of(value))
        self._foreign.append((leaf, found))
        return found.value

    def _of_another(self, tensor: Tensor, tag: Tag) -> Tensor:
        if tag.stage == self.stage and not tensor.requires_grad:
            return tensor  # running state: a lane takes the micro-batches in order
        step = (
            "this step"
            if tag.key.step == self.key.step
            else "the recording (it is still there: clear it)"
            if tag.key.step == RECORDING
            else "an earlier step"
        )
        why = "has a gradient path" if tensor.requires_grad else f"was made on stage {tag.stage}"
        raise StateError(
            f"micro-batch {self.microbatch} on stage {self.stage} reads a tensor of shape "
            f"{tuple(tensor.shape)} that belongs to micro-batch {tag.key.microbatch} of {step} and "
            f"{why} ({users_line()}): state on self or in a global is shared by all micro-batches; "
            "pass the tensor along, detach it, or keep one for each current_microbatch()"
        )

    def _imported(self, tensor: Tensor, tag: Tag) -> Tensor:
        if tag.imports is None:
            tag.imports = {}
        found = tag.imports.get(self.hop)
        if found is None:
            if self._hop_imports:
                self.notice_writes()
                self._check_current(tensor, tag)
            found = self._enter(tensor, self._copied(tensor, tag.hop), tag.imports, tag.hop)
            self._tag(found.value)
            if self.step.is_mixed and self.stays(tensor):
                getattr(found.value, TAG).is_kept = True
            if self.step.tracks_writes:
                self._join_aliases(tensor, found)
            self.note_import(tensor, tag.hop, None)
        found.share_attributes(tensor)
        self._foreign.append((tensor, found))
        return found.value

    def _copied(self, tensor: Tensor, from_hop: int) -> Tensor:
        """The values of another hop's tensor, on this hop's device."""
        watch, after = self._watch(tensor, from_hop, self.hop), self._left.get(from_hop)
        on_host = self.stays(tensor)
        sent = self.step.send(tensor, self.stage, after=after, watch=watch, on_host=on_host)
        self._lent.add(from_hop, sent)
        if self._lent and sent.arrived is None:
            self._lent.settle_on(tensor.device)  # an alias, and it may be written
        return self.receive(self.hop, sent)

    def receive(self, hop: int, sent: PendingCopy) -> Tensor:
        """What was sent to a hop, there to be read until the hop is over."""
        return self._taken.receive(hop, sent)

    def _return(self, hop: int, over: torch.Event | None = None) -> None:
        """A hop is over: what was sent to it is not read any more."""
        taken = self._taken.pop(hop)
        if taken:
            over = over or mark(taken[0][0].device)
            assert over is not None
            self.step.returned.add(hop, taken, over)

    def _enter(
        self, tensor: Tensor, value: Tensor, imports: dict[int, Import], home_hop: int
    ) -> Import:
        """Make an import: an entry of this hop's graph if there is a gradient to carry back."""
        is_entry = tensor.requires_grad and self.step.differentiable
        if is_entry:
            source, from_ = home_hop, tensor
            for hop, earlier in imports.items():
                if source <= hop < self.hop and earlier.is_entry:
                    source, from_ = hop, earlier.value
            slot = GradientSlot()
            value = enter_graph(slot, value)
            entry = edge_of(value) if self.step.splits else None
            on_host = self.stays(tensor)
            crossing = Crossing(entry, slot, source, edge_of(from_), on_host)
            self._graph(self.hop).crossings.append(crossing)
        elif value is tensor:
            value = tensor.detach()
        made = Import(value, is_entry, version_of(value), besides=class_attributes(value))
        if not value.is_inference():  # else nothing tells whether it is written
            imports[self.hop] = made
            self._hop_imports.append((weakref.ref(tensor), weakref.ref(made)))
        return made

    def _watch(self, tensor: Tensor, from_hop: int, to_hop: int) -> Watch | None:
        """What an observer has for a copy between hops (-1: the caller)."""
        observer = self.step.observer
        if observer is None:
            return None
        return observer.watch(tensor, from_hop, to_hop, self.microbatch)

    def note_import(self, tensor: Tensor, home_hop: int, name: str | None) -> None:
        """Called for each new import; the recording writes it down."""

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where the stage that asks finds a tensor."""
        own, device = tensor.device, self.step.device_of(max(self.cursor.stage, 0))
        if device is None or own.type == "meta" or self.stays(tensor):
            return own
        return device

    def stays(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host because the user's code wants it there.

        What a model on one accelerator finds on the host it finds there in a pipeline too: results
        that an accelerator's stage has on the host, and tensors from outside of the forward.
        Parameters, buffers, inputs, and what a stage on the CPU computes follow the forward.
        """
        if tensor.device.type != "cpu":
            return False
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None:
            made_on = self.step.device_of(tag.stage)
            return tag.is_kept or (made_on is not None and made_on.type != "cpu")
        home = self.step.home_of(tensor)
        return home is None or home.is_adopted

    def keep_on_host(self, result: Any, given: Arguments) -> Any:
        """The forward asked for this to be on the host, where other stages are not."""
        if isinstance(result, Tensor) and result.device.type == "cpu":
            if any(result is a for a in given):
                result = result.view_as(result)  # it was there: the tensor itself may follow
            self.claim(result)
            getattr(result, TAG).is_kept = True
        return result

    # --- what was made here, and what was written to

    def claim(self, result: Any) -> None:
        """The tensors in a result were made on this hop."""
        outside = self._outside
        if isinstance(result, Tensor):
            self._tag(result)
        elif isinstance(result, tuple | list | dict) or hasattr(result, "__dict__"):
            for tensor in tensors(result):
                self._tag(tensor)
        if outside:
            outside.clear()

    def _tag(self, tensor: Tensor) -> None:
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None and tag.key is self.key:
            return
        if tag is None and self._outside and self._is_untouched(tensor):
            return  # an operation that had nothing to do returned what it was given
        if self.step.home_of(tensor) is None:
            setattr(tensor, TAG, self._make_tag())

    def _is_untouched(self, tensor: Tensor) -> bool:
        return any(
            other is tensor and version_of(other) == version for other, version in self._outside
        )

    def _make_tag(self) -> Tag:
        return Tag(self.key, self.hop, self.stage)

    def take_foreign(self) -> list[tuple[Tensor, Import]]:
        """The imports that the operation about to run was given."""
        foreign = self._foreign
        if foreign:
            self._foreign = []
        return foreign

    def check_written(self, foreign: list[tuple[Tensor, Import]]) -> None:
        """After an operation or a sealed call: did it write to one of its imports?"""
        for tensor, used in foreign:
            used.return_attributes(tensor)
            version = version_of(used.value)
            if version != used.version:
                used.version = version
                self._write_through(tensor, used)

    def notice_writes(self) -> None:
        """Which of this hop's imports were written to, by whatever way."""
        for tensor_ref, import_ref in self._hop_imports:
            tensor, used = tensor_ref(), import_ref()
            if tensor is not None and used is not None:
                self.check_written([(tensor, used)])

    def _write_through(self, tensor: Tensor, used: Import) -> None:
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None:
            home = self.step.home_of(tensor)
            what = "a constant" if home is None else f"{home.name!r}"
            lives = "elsewhere" if home is None else f"on stage {home.stage}"
            raise StateError(
                f"{what} of shape {tuple(tensor.shape)} lives {lives} and was written in place, "
                f"there or on stage {self.stage}, which reads it too ({users_line()}); let one "
                f"stage write it and read it, or {UNCUT}"
            )
        aliases = used.aliases
        if aliases is None:
            raise CrossingError(
                f"an operation on stage {self.stage} writes in place to a tensor of shape "
                f"{tuple(tensor.shape)} made on stage {tag.stage} ({users_line()}), which the "
                "recorded forward did not; give Pipeline a sample that takes this way"
            )
        if aliases.imported > 1:
            raise CrossingError(
                f"an operation on stage {self.stage} writes in place to a tensor of shape "
                f"{tuple(tensor.shape)} made on stage {tag.stage}, of which views crossed as well "
                f"({users_line()}): they would miss the write; clone() it first, or {UNCUT}"
            )
        aliases.written_on = self.hop
        aliases.imported = 0  # of what counts from here on
        tag.newest = used.value
        self.wrote_foreign = True

    def _join_aliases(self, tensor: Tensor, made: Import) -> None:
        aliases = aliases_of(tensor, self.key)
        if aliases is None:
            aliases = Aliases()
            set_aliases(tensor, self.key, aliases)
        tag: Tag = getattr(tensor, TAG)
        if tag.imports is None or len(tag.imports) <= 1:
            aliases.imported += 1  # this tensor's first; a further hop adds no alias
        set_aliases(made.value, self.key, aliases)
        made.aliases = aliases

    def _check_current(self, tensor: Tensor, tag: Tag) -> None:
        aliases = aliases_of(tensor, self.key)
        if aliases is not None and aliases.written_on is not None and tag.hop < aliases.written_on:
            raise CrossingError(
                f"an operation on stage {self.stage} reads a tensor of shape "
                f"{tuple(tensor.shape)} made on stage {tag.stage}, whose storage was written in "
                f"place on a later stage through another view ({users_line()}): it would miss the "
                f"write; clone() before writing, or {UNCUT}"
            )

    # --- recomputation

    def is_recomputing(self) -> bool:
        """Whether a call that can be recomputed is, where the run is now."""
        asked = self.cursor.checkpoint
        mode = self.recomputes if asked is None else asked
        return mode and self.step.differentiable and torch.is_grad_enabled()

    def recomputed(
        self,
        recompute_spec: RecomputeSpec,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        modes: Sequence[TorchFunctionMode],
    ) -> RecomputedCall:
        """A call on this hop that will be recomputed."""
        known = self.step.sources[self.hop] if self.step.sources else []
        device = self.step.device_of(self.stage) or torch.device("cpu")
        recomputed = RecomputedCall(
            recompute_spec,
            self.stage,
            self.microbatch,
            known or torchs_of(device),
            function,
            args,
            kwargs,
            modes,
            offload=self.offload,
            comparisons=self.step.comparisons,
        )
        self.recomputed_calls.setdefault(self.hop, []).append(recomputed)
        return recomputed

    def restore(self, hop: int) -> None:
        """Bring back what a hop has saved, or make it again: before the gradient is there."""
        recomputed_calls = self.recomputed_calls.get(hop, [])
        for at, recomputed in enumerate(recomputed_calls):
            for following in recomputed_calls[at : at + 2]:
                following.fetch()
            recomputed.recompute()
        if self.offload is not None:
            self.offload.fetch(hop)

    # --- inputs, results, and the way back

    def take_input(self, tensor: Tensor, index: int = 0) -> Tensor:
        """A micro-batch's slice of an input, as if made on the hop where the run is: on the
        first one before it has begun, on the last one for the target."""
        hop, stage = self._where_inputs_are()
        value = self.receive(hop, self.step.lend(tensor, stage, self._watch(tensor, -1, hop)))
        if value.layout is torch.strided and value.nbytes < value.untyped_storage().nbytes():
            value = value.data  # a slice of the batch: a write to it is none to the others
        if tensor.requires_grad and self.step.differentiable:
            slot = GradientSlot()
            value = enter_graph(slot, value)
            edge = edge_of(value)  # stands for the caller: -1 - index
            self._graph(hop).crossings.append(Crossing(edge, slot, -1 - index, edge))
        share_attributes(tensor, value, class_attributes(value))
        setattr(value, TAG, Tag(self.key, hop, stage))
        return value

    def _where_inputs_are(self) -> tuple[int, int]:
        """A hop and its stage."""
        if self.hop >= 0:
            return self.hop, self.stage
        return 0, self.step.route[0] if self.step.route else 0

    def hop_of(self, tensor: Tensor) -> int:
        """The hop that a result of this run was made on."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None and tag.key is self.key:
            return tag.hop
        home = self.step.home_of(tensor)
        return self.hop if home is None else home.hop

    def newest(self, tensor: Tensor) -> Tensor:
        """A result as later hops left it, for the caller to have."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None:
            return tensor
        while tag.newest is not None:
            tensor = tag.newest
            tag = cast(Tag, getattr(tensor, TAG))
        if self.wrote_foreign:
            self._check_current(tensor, tag)
        return tensor

    def add_root(self, hop: int, edge: GradientEdge, gradient: Tensor | None) -> None:
        """Start the backward of a hop from here, too."""
        self._graph(hop).roots.append((edge, gradient))

    def add_sent_root(self, hop: int, edge: GradientEdge, gradient: PendingCopy) -> None:
        """The same with a gradient that is on its way: the backward waits for it as it begins."""
        graph = self._graph(hop)
        graph.roots.append((edge, gradient.value))
        graph.arriving.append(gradient)

    def backward(
        self, hop: int, *, split: bool = False, before_whole: Callable[[], None] | None = None
    ) -> None:
        """Run one hop's backward and send the gradients of its crossings home.

        Args:
            hop: which.
            split: leave the gradients of the parameters to :meth:`finish_backward`, if they can
                be told apart.
            before_whole: called before all gradients are computed at once.
        """
        self._lent.settle(hop)
        graph = self.graphs.pop(hop, None)
        if graph is not None:
            self._run_backward(hop, graph, split=split, before_whole=before_whole)
            graph.roots.clear()
            graph.arriving.clear()
        if hop not in self._weights:
            self._return(hop)

    def _run_backward(
        self, hop: int, graph: HopGraph, *, split: bool, before_whole: Callable[[], None] | None
    ) -> None:
        for sent in graph.arriving:
            self.receive(hop, sent)
        rest = None
        if split and graph.roots and hop not in self.hooked:
            self._keep_recomputed(hop, True)
            rest = run_input_part(graph)
        if rest is not None:
            self._weights[hop] = rest
        else:
            if before_whole is not None:
                before_whole()
            self._keep_recomputed(hop, False)
            run_whole(graph)
            self._drop_saved(hop)
        self.step.sent_back.settle(hop)  # of the micro-batch before
        after = self.step.mark(self.step.route[hop]) if graph.crossings else None
        for crossing in graph.crossings:
            slot = crossing.slot
            if slot.gradient is not None:
                gradient, slot.gradient = slot.gradient, None
                self._send_home(crossing, gradient, hop, after)

    def finish_backward(self, hop: int) -> None:
        """The gradients of a hop's parameters, where its backward is in two parts."""
        rest = self._weights.pop(hop, None)
        if rest is not None:
            rest.run()
        self._drop_saved(hop)
        self._return(hop)

    def _drop_saved(self, hop: int) -> None:
        self.recomputed_calls.pop(hop, None)
        if self.offload is not None:
            self.offload.forget(hop)

    def _keep_recomputed(self, hop: int, keeps: bool) -> None:
        for recomputed in self.recomputed_calls.get(hop, ()):
            recomputed.keeps = keeps or hop in self.step.hops_rerunning_forward
        if keeps and self.offload is not None:
            self.offload.keep(hop)

    def _send_home(
        self, crossing: Crossing, gradient: Tensor, hop: int, after: torch.Event | None
    ) -> None:
        if crossing.to_hop < 0:
            self.input_gradients[-1 - crossing.to_hop] = gradient
            return
        watch = self._watch(gradient, hop, crossing.to_hop)
        stage = self.step.route[crossing.to_hop]
        on_host = crossing.on_host
        sent = self.step.send(gradient, stage, after=after, back=True, watch=watch, on_host=on_host)
        self.step.sent_back.add(hop, sent)
        self.add_sent_root(crossing.to_hop, crossing.to_edge, sent)

    def _graph(self, hop: int) -> HopGraph:
        graph = self.graphs.get(hop)
        if graph is None:
            graph = self.graphs[hop] = HopGraph()
        return graph

    def finish_forward(self) -> None:
        """Let go of everything that only the forward needed."""
        self.cursor.on_move = None
        self._hop_imports.clear()
        self._home_imports.clear()
        self._foreign.clear()
        self._outside.clear()
        self.on_border = None
        self.on_arrival.clear()
        if not self.step.differentiable:
            late = [hop for hop in self._taken.hops() if self._is_read_later(hop)]
            self._lent.settle_all()
            for hop in self._taken.hops():
                self._return(hop, None if hop in late else self._left.get(hop))

    def _is_read_later(self, hop: int) -> bool:
        """Whether what was sent to a hop may be read after the run has left it: by a later hop
        on the device, which has it as its own, or by a copy to another device."""
        device = self.step.device_of(self.step.route[hop])
        later = self.step.route[hop + 1 : self.hop + 1]
        return any(self.step.device_of(s) == device for s in later) or self._lent.reads(
            self._taken.of(hop)
        )

    def settle(self) -> None:
        """No hop's tensors are written or freed from here on before the copies of them are over."""
        self._lent.settle_all()
        self._taken.drop()

    def abandon(self) -> None:
        """Let go of everything: the step has failed, or is over."""
        self.finish_forward()
        self.settle()
        self.recomputed_calls.clear()
        self.offload = None
        self.graphs.clear()
        self._weights.clear()

    def is_foreign(self, tensor: Tensor) -> bool:
        """Whether a tensor was made, or lives, on another hop than this one."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None:
            return tag.key is not self.key or tag.hop != self.hop or tag.newest is not None
        home = self.step.home_of(tensor)
        return home is not None and home.hop != self.hop

    def refuse_foreign(self, what: str, tensors_: Iterable[Tensor]) -> None:
        """Raise if an operation that autograd cannot follow over a cut is handed such a tensor."""
        for tensor in tensors_:
            if self.is_foreign(tensor):
                raise CrossingError(
                    f"{what} on stage {self.stage} is given a tensor of shape "
                    f"{tuple(tensor.shape)} of another stage ({users_line()}): the graph is cut "
                    f"between them; {UNCUT}"
                )

    def handed(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Reader:
        """What a function is handed that is about tensors themselves, so that no copy can stand in:
        it replaces a tensor's data or history, or runs a backward in the forward.

        Raises:
            CrossingError: it is given a tensor of another stage.
        """
        if func is torch.autograd.grad:
            self.refuse_foreign("autograd.grad", tensors((args, kwargs)))
        elif func.__name__ != "backward":  # that begins at a copy, and ends at the cut behind it
            what = "an assignment to .data" if func.__name__ == "__set__" else func.__name__
            self.refuse_foreign(what, args[:1])
        return self.local


def detached(value: Any) -> Any:
    """A nested value with every tensor cut off from autograd, and from our tags."""
    return map_tensors(Tensor.detach, value)
