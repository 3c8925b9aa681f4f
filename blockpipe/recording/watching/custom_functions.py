"""Find tensors that a forward's custom autograd functions read without taking them as arguments.

The backward of such a function is the user's code and runs as a whole, on one stage. Only its
arguments can carry a tensor of another stage there.
"""

from __future__ import annotations

from torch import Tensor

from ..._common.callsite import users_line
from ..._torch.tensors import shape_of
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.tags import TAG, UNCUT, Tag
from ...errors import CrossingError
from ..calls import Call
from ..entries import TensorInfo
from .calls import CallsUnderWay

_REENTRANT = "CheckpointFunction"


class AppliedFunctions:
    """The custom functions that the forward has applied.

    Args:
        run: the run that is watched.
        calls: the calls under way.

    Attributes:
        applied: the name of each function, and the call that it was applied in.
        failures: errors about such functions, each with the call that it was applied in; only those
            outside of sealed calls are raised.
    """

    def __init__(self, run: MicrobatchRun, calls: CallsUnderWay) -> None:
        self.applied: list[tuple[str, Call | None]] = []
        self.failures: list[tuple[CrossingError, Call | None]] = []
        self._run = run
        self._calls = calls

    @property
    def last(self) -> str:
        """The name of the function that was applied last."""
        return self.applied[-1][0] if self.applied else ""

    def is_in_reentrant(self) -> bool:
        """Return whether the function of a reentrant ``torch.utils.checkpoint`` is running."""
        return self._run.sealed > 0 and self.last == _REENTRANT

    def apply(self, name: str) -> None:
        """Note that a function is applied."""
        self.applied.append((name, self._calls.innermost))

    def fail(self, error: CrossingError) -> None:
        """Note an error, which is raised unless the forward is in a sealed call now."""
        self.failures.append((error, self._calls.innermost))

    def calls_functions(self, name: str) -> None:
        """Note an operator that calls functions, such as ``torch.cond``."""
        message = (
            f"expected operations outside of modules, got torch's {name} ({users_line()}): nobody "
            "sees what its functions read there; put it into a module of its own, which is given "
            "what they read"
        )
        self.fail(CrossingError(message))

    def read_parameter(self, held: TensorInfo) -> None:
        """Note that a function reads a parameter that is not its argument. Its backward may add to
        the parameter's gradient, on the stage where the parameter lives."""
        stage = self._run.stage
        if held.stage == stage or not held.trainable:
            return
        what, remedy = f"autograd.Function {self.last!r}", f"pass it as an argument, or {UNCUT}"
        if self.last == _REENTRANT:
            what, remedy = "torch.utils.checkpoint", "pass use_reentrant=False"
        elif not self._run.step.graphs.cut:
            return
        self._fail_in_last(
            f"{what} on stage {stage} reads parameter {held.name!r} of stage {held.stage} "
            f"({users_line()}): its backward would run there and here at once; {remedy}"
        )

    def read(self, tensor: Tensor) -> None:
        """Note that a function reads a tensor. If that is another stage's and not an argument, the
        gradients of its backward would bypass the cut."""
        if not self._run.step.graphs.cut:
            return  # there are no copies: an argument cannot be told from other tensors
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None or tag.key is not self._run.key or tag.hop == self._run.hop:
            return
        if id(tensor) in self._calls.given_inside():
            return
        self._fail_in_last(
            f"autograd.Function {self.last!r} on stage {self._run.stage} reads a tensor of shape "
            f"{shape_of(tensor)} made on stage {tag.stage} that is none of its arguments "
            f"({users_line()}); pass it as one (torch.utils.checkpoint: pass use_reentrant=False)"
        )

    def _fail_in_last(self, message: str) -> None:
        call = self.applied[-1][1] if self.applied else None
        self.failures.append((CrossingError(message), call))
