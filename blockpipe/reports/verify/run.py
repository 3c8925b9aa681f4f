"""Three runs from one state: the pipeline's step, the plain loop's, and the whole batch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.nested import map_tensors, tensors
from ..._common.threads.thread_state import intra_operation_threads
from ..._torch.modules import is_compiled
from ...batches.batch_dims import BatchDims, Role, dims_of_call, output_of
from ...batches.class_weights import reduction_for
from ...batches.losses import own_or_mean_square
from ...batches.microbatch import split
from ...devices.devices import check_device
from ...devices.rng_streams import Source, torchs_of
from ...errors import UsageError
from ...execution.step_runner import StepRunner
from ...preparation.options import PipelineOptions
from ...restoring.preserved import PreservedModel, fresh_copy, moved_copy
from .divergence import CallWatch
from .reference_loop import ReferenceLoop
from .result import Outcome, named_outputs

_IDENTITY: Any = object.__eq__


class Verifier:
    """Runs a pipeline's step and the plain one from the same state.

    Args:
        runner: runs the pipeline's steps.
        args: the model's positional arguments for the whole batch.
        kwargs: the model's keyword arguments.
        target: the second argument of the loss.
        loss_fn: the step's loss function.
        device: the device of the plain run; with ``"stages"`` it is uncut, on the stages' devices.
    """

    def __init__(
        self,
        runner: StepRunner,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        device: Any,
    ) -> None:
        # Outputs that are not joined are joined here: the whole batch's are compared with them.
        self.options = replace(runner.options, batch_dims=joining(runner.options.batch_dims))
        self.runner, self.preparer = replace(runner, options=self.options), runner.preparer
        self.args, self.kwargs, self.target = args, kwargs, target
        self.loss = loss_fn if isinstance(loss_fn, nn.Module) else None
        self.modules = [self.preparer.model, *([self.loss] if self.loss is not None else [])]
        self.trains = torch.is_grad_enabled() and (
            any(p.requires_grad for module in self.modules for p in module.parameters())
            or any(t.requires_grad for t in tensors((args, kwargs)))
        )
        microbatches = runner.split(args, kwargs, target)
        with torch.set_grad_enabled(self.trains):  # as it will run: each mode has a recording
            self.prepared = self.preparer.prepare(microbatches[0], self.options)
        self.last = self.prepared.devices[self.prepared.route[-1]]
        if self.loss is not None:
            self.loss.to(self.last)  # as a step does
        self.loss_fn = loss_fn if loss_fn is not None else own_or_mean_square
        self.notes: list[str] = []
        self.count = len(microbatches)
        self.wanted = device
        self.device: torch.device | None = None  # ``None``: on the stages
        self.choose_reference()
        devices = [*self.prepared.devices, *([self.device] if self.device else [])]
        sources: list[Source] = [s for device in devices for s in torchs_of(device)]
        self.preserved = PreservedModel(self.modules, sources, self.given)

    @property
    def given(self) -> list[Any]:
        """The arguments of the step, and the target."""
        return [self.args, self.kwargs, self.target]

    # --- the two runs

    @property
    def draws(self) -> bool:
        """Whether the forward draws random numbers."""
        return any(self.prepared.sources)

    def all_modules(self) -> list[nn.Module]:
        """Return all modules of the model and the loss."""
        return [inner for module in self.modules for inner in module.modules()]

    def choose_reference(self) -> None:
        """Choose the device of the plain run; after a step anew, which may be the first to draw."""
        self.device = self._reference_device()
        note = "the forward draws random numbers on several devices: the reference runs on these"
        if self.device is None and self.wanted != "stages" and note not in self.notes:
            self.notes.append(note)

    def _reference_device(self) -> torch.device | None:
        stages = {self.prepared.devices[stage] for stage in self.prepared.route}
        if self.wanted == "stages":
            return None
        if self.wanted is None:
            chosen = self.prepared.devices[self.prepared.route[0]]
        else:
            chosen = check_device(self.wanted)
        # Each device draws numbers of its own: only the stages themselves draw these again.
        if self.draws and stages != {chosen}:
            if self.wanted is not None:
                raise UsageError(
                    f"the forward draws random numbers on {sorted(map(str, stages))}, which "
                    f"{str(chosen)!r} cannot repeat ({users_line()}); leave device= out (the "
                    "reference is then uncut, on the stages' devices), or set dropout to 0"
                )
            return None
        return chosen

    @property
    def exact(self) -> bool:
        """Whether equality to the bit is promised."""
        devices = {*self.prepared.devices, self.device or self.prepared.devices[0]}
        is_host = all(device.type == "cpu" for device in devices)
        # A module that is compiled as it runs may be other code the next time.
        changes = self.prepared.compiled is not None or any(
            is_compiled(m) or isinstance(m, torch.jit.ScriptModule)
            for module in self.modules
            for m in module.modules()
        )
        return is_host and not changes

    @property
    def lanes(self) -> int:
        """The number of lanes of the pipelined run."""
        option = self.options.schedule
        one = self.prepared.runs_inline(option, self.count)
        return 1 if one else len(self.prepared.schedule(option, self.count).lanes)

    def described(self) -> str:
        """Return a description of the pipelined run."""
        option = self.options.schedule
        name = option if isinstance(option, str) else "your own schedule"
        if self.lanes > 1:
            name = self.prepared.schedule(option, self.count).name
        how = f"on {self.lanes} lanes" if self.lanes > 1 else "in one thread"
        return f"{name} {how}, {self.count} micro-batches, checkpoint={self.options.checkpoint!r}"

    def reference(self) -> str:
        """Return a description of the plain run."""
        if self.device is None:
            return "one uncut graph over the stages' devices, one micro-batch at a time"
        return f"the plain loop on {self.device}, micro-batch by micro-batch"

    # --- the runs

    @contextmanager
    def stricter(self) -> Iterator[None]:
        """While entered, run the schedule on its lanes even where operations are small.

        A step would take one thread there, but what is verified is meant for larger machines too.
        """
        known = self.preparer.known
        key = next(key for key, prepared in known.items() if prepared is self.prepared)
        before, strict = self.prepared, replace(self.prepared)
        strict.__dict__["is_small"] = False
        try:
            known[key] = self.prepared = strict
            yield
        finally:
            self.prepared = before
            if key in known:
                known[key] = before

    def pipelined(self, watch: CallWatch | None = None) -> Outcome:
        """Run a step of the pipeline."""
        with self.preserved.run(), ExitStack() as stack:
            if watch is not None:
                stack.enter_context(watch.watching())
            return self._run_step()

    def plain(self, watch: Callable[[nn.Module], CallWatch] | None = None) -> tuple[Outcome, Any]:
        """Run the same step without a pipeline, and return its watch if ``watch`` makes one."""
        threads = torch.get_num_threads()
        if not self.prepared.is_asynchronous:
            threads = max(1, threads // self.lanes)  # a lane's number: sums depend on it
        with intra_operation_threads(threads):
            return self._plain(watch)

    def _plain(self, watch: Callable[[nn.Module], CallWatch] | None) -> tuple[Outcome, Any]:
        if self.device is None:
            with self._uncut():
                watching = None if watch is None else watch(self.preparer.model)
                return self.pipelined(watching), watching
        with self.preserved.run():
            return self._run_moved(self.device, watch)

    def _run_moved(
        self,
        device: torch.device,
        watch: Callable[[nn.Module], CallWatch] | None = None,
        chunks: int | None = None,
    ) -> tuple[Outcome, Any]:
        """Run it on copies of the modules: they end with it, before what their end may change is
        put back."""
        model, *losses = [moved_copy(module, device) for module in self.modules]
        watching = None if watch is None else watch(model)
        with ExitStack() as stack:
            if watching is not None:
                stack.enter_context(watching.watching())
            return self._run_plain(model, *losses, chunks=chunks), watching

    def _given(self, device: torch.device | None) -> tuple[Any, Any, Any, dict[str, Tensor]]:
        """Return copies of the arguments for a run, and those of them that need gradients.

        Each run has copies of its own, because a forward may write to them.
        """
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = fresh_copy(tensor, device or tensor.device)
            return copies[id(tensor)]

        args, kwargs, target = map_tensors(own, (self.args, self.kwargs, self.target))
        named = {
            f"{name}[{i}]" if i else str(name): tensor
            for name, value in [*enumerate(args), *kwargs.items(), ("the loss's target", target)]
            for i, tensor in enumerate(tensors(value))
            if tensor.requires_grad
        }
        return args, kwargs, target, named

    def _run_step(self) -> Outcome:
        args, kwargs, target, inputs = self._given(None)
        outcome = Outcome()
        if not self.trains:
            with torch.no_grad():
                self._put_outputs(outcome, self.runner.forward(args, kwargs))
        else:
            result = self.runner.forward_backward(
                args, kwargs, target, self.loss_fn, return_outputs=True
            )
            self._put_outputs(outcome, result.outputs)
            outcome.put("loss", [("loss", result.loss)])
        self._put_state(outcome, self.modules, inputs)
        return outcome

    def whole(self) -> Outcome:
        """Run the step of the whole batch in one forward."""
        if self.device is None:
            with self._uncut(chunks=1):
                return self.pipelined()
        with self.preserved.run():
            return self._run_moved(self.device, chunks=1)[0]

    @contextmanager
    def anew(self) -> Iterator[None]:
        """While entered, use a recording of the model as it is now."""
        before = self.prepared, self.preserved
        with self.preparer.apart():
            try:
                sources = self.preserved.sources
                microbatches = self.runner.split(self.args, self.kwargs, self.target)
                self.prepared = self.preparer.prepare(microbatches[0], self.options)
                self.preserved = PreservedModel(self.modules, sources, self.given)
                yield
            finally:
                self.prepared, self.preserved = before

    @contextmanager
    def _uncut(self, chunks: int | None = None) -> Iterator[None]:
        """While entered, run steps as one ordinary graph over the stages' devices."""
        before = self.runner
        options = PipelineOptions(
            chunks=chunks or self.options.chunks,
            schedule="uncut",
            deferred_batch_norm=self.options.deferred_batch_norm,
            batch_dims=self.options.batch_dims,
            loss_reduction=self.options.loss_reduction,
        )
        self.runner = replace(before, options=options)
        try:
            with self.preparer.apart(compiles=False):
                yield
        finally:
            self.runner = before

    def _run_plain(
        self, model: nn.Module, *losses: nn.Module, chunks: int | None = None
    ) -> Outcome:
        args, kwargs, target, inputs = self._given(self.device)
        loss_fn: Callable[..., Any] = losses[0] if losses else self.loss_fn
        options = self.options
        dims = dims_of_call(self.preparer.model, options.batch_dims, args, kwargs, target)
        sources = [*dict.fromkeys(s for hop in self.prepared.sources for s in hop)]
        loop = ReferenceLoop(
            split(args, kwargs, target, chunks or options.chunks, dims, cut=False),
            loss_fn if self.trains else None,
            reduction_for(self.loss_fn, options.loss_reduction),
            options.batch_dims,
            sources or (torchs_of(self.last) if self._loss_draws else []),
            is_deferred=options.deferred_batch_norm,
        )
        outcome = Outcome()
        outputs, loss = loop.run(model, self.device)
        self._put_outputs(outcome, outputs)
        if loss is not None:
            outcome.put("loss", [("loss", loss)])
        self._put_state(outcome, [model, *losses], inputs)
        return outcome

    @property
    def _loss_draws(self) -> bool:
        return any(self.prepared.loss_draws.values())

    def _put_outputs(self, outcome: Outcome, outputs: Any) -> None:
        found = []
        for name, value in named_outputs(outputs):
            if type(value).__eq__ is _IDENTITY:  # an object of each run, such as a cache of keys
                note = f"not compared: a {type(value).__name__} in the outputs"
                self.notes += [] if note in self.notes else [note]
            else:
                found.append((name, value))
        outcome.put("outputs", found)

    def _put_state(
        self, outcome: Outcome, modules: list[nn.Module], inputs: dict[str, Tensor]
    ) -> None:
        for prefix, module in zip(("", "loss_fn."), modules, strict=False):
            if self.trains:
                outcome.put(
                    "gradients",
                    [(prefix + n, p.grad) for n, p in module.named_parameters() if p.requires_grad],
                )
            buffers = [(prefix + n, b.detach().clone()) for n, b in module.named_buffers()]
            outcome.put("buffers", buffers)
        if self.trains:
            outcome.put("input gradients", [(name, t.grad) for name, t in inputs.items()])


def joining(dims: BatchDims) -> BatchDims:
    """Return the same ``batch_dims``, by which outputs are joined."""
    if not isinstance(dims, Mapping) or output_of(dims) is not None:
        return dims
    return {name: dim for name, dim in dims.items() if name not in ("output", Role.OUTPUT)}
