"""Custom autograd functions of a recorded forward: what they read that is no argument of theirs.

The backward of such a function is code of the user's, which runs as one, on one stage. A tensor of
another stage could only be handed over by its arguments.
"""

from __future__ import annotations

from torch import Tensor

from ..._common.callsite import users_line
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.tags import TAG, UNCUT, Tag
from ...errors import CrossingError
from ..calls import Call
from ..recording import TensorInfo
from .calls import CallsUnderWay


class CustomFunctions:
    """The custom functions that the forward has applied.

    Args:
        run: the run that is watched.
        calls: the calls that it is inside of.

    Attributes:
        applied: the name of each, and the call that it was in.
        failures: what no pipeline can do, and the call that it was in. In a sealed call it does no
            harm.
    """

    def __init__(self, run: MicrobatchRun, calls: CallsUnderWay) -> None:
        self.applied: list[tuple[str, Call | None]] = []
        self.failures: list[tuple[CrossingError, Call | None]] = []
        self._run = run
        self._calls = calls

    @property
    def last(self) -> str:
        """The name of the one that was applied last."""
        return self.applied[-1][0] if self.applied else ""

    def apply(self, name: str) -> None:
        """Note that one is applied."""
        self.applied.append((name, self._calls.innermost))

    def fail(self, error: CrossingError) -> None:
        """Note what no pipeline can do outside of a sealed call, where the forward is now."""
        self.failures.append((error, self._calls.innermost))

    def read_parameter(self, held: TensorInfo) -> None:
        """Note that one reads a parameter that it was not given: its backward may add to the
        parameter's gradient, where the parameter lives."""
        stage = self._run.stage
        if held.stage == stage or not held.trainable:
            return
        what, remedy = f"autograd.Function {self.last!r}", f"pass it as an argument, or {UNCUT}"
        if self.last == "CheckpointFunction":
            what, remedy = "torch.utils.checkpoint", "pass use_reentrant=False"
        elif not self._run.step.graphs.cut:
            return
        self._fail_in_last(
            f"{what} on stage {stage} reads parameter {held.name!r} of stage {held.stage} "
            f"({users_line()}): its backward would run there and here at once; {remedy}"
        )

    def read(self, tensor: Tensor) -> None:
        """Note that one reads a tensor, perhaps one of another stage that it was not given: then
        what its backward adds would go around the cut."""
        if not self._run.step.graphs.cut:
            return  # there are no copies: an argument cannot be told from other tensors
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None or tag.key is not self._run.key or tag.hop == self._run.hop:
            return
        if id(tensor) in self._calls.given_inside():
            return
        self._fail_in_last(
            f"autograd.Function {self.last!r} on stage {self._run.stage} reads a tensor of shape "
            f"{tuple(tensor.shape)} made on stage {tag.stage} that is none of its arguments "
            f"({users_line()}); pass it as one (torch.utils.checkpoint: pass use_reentrant=False)"
        )

    def _fail_in_last(self, message: str) -> None:
        call = self.applied[-1][1] if self.applied else None
        self.failures.append((CrossingError(message), call))
