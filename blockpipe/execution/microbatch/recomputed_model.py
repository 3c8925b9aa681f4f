"""Check that a backward which recomputes activations finds the model that the forward had.

Between ``pipe(x)`` and the caller's backward, an optimizer may step, ``model.train()`` be called,
or a schedule set ``model.alpha``. Where activations are kept, autograd finds a parameter that was
written to, and the others do not matter.
"""

from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._torch.tensors import version_of
from ...crossing.carried_values import is_among, name_of
from ...errors import StateError
from ...preparation.prepared import Prepared
from ...preparation.watched.watched_values import WatchedValues
from ...recording.plain_values.places import in_words


class RecomputedModel:
    """What hops that are recomputed read of a model, as it is now.

    Args:
        model: the user's.
        prepared: with the recording.
        microbatches: the number of micro-batches.
        values: the plain values that forwards read.
    """

    def __init__(
        self,
        model: nn.Module,
        prepared: Prepared,
        microbatches: int,
        values: WatchedValues,
    ) -> None:
        recording, self._model, self._set_since = prepared.recording, model, values.set_since()
        hops = {
            hop
            for hop in range(len(prepared.route))
            for m in (0, microbatches - 1)
            if prepared.activation_bytes(hop, m, microbatches).calls
        }
        tensors, held_ones = self._now(), (*recording.parameters, *recording.buffers)
        read = (held for held in held_ones if hops & {*held.hops} and not held.written)
        names = {held.name for held in read} & tensors.keys()
        self._tensors = {name: (tensors[name], *_state_of(tensors[name])) for name in names}
        self._outside = [
            (outside, tensor, *_state_of(tensor))
            for outside in recording.outside
            if hops & {*outside.hops} and not outside.written and outside.tensor is not None
            if (tensor := outside.tensor()) is not None
        ]
        self._values = recording.only_read.keys() & recording.read_again
        modules = dict(model.named_modules())
        paths = {call.path for call in recording.calls if call.hop in hops} & modules.keys()
        self._modes = {path: (modules[path], modules[path].training) for path in paths}

    def check(self) -> None:
        """Raise :class:`StateError` if it is another one."""
        now = self._now()
        for name, (tensor, *state) in self._tensors.items():
            if now.get(name) is not tensor:
                raise _changed(f"{name!r} was replaced")
            if [*_state_of(tensor)] != state:
                raise _changed(f"{name!r} was written to")
        for outside, tensor, *state in self._outside:
            if [*_state_of(tensor)] != state:
                raise _changed(f"{outside.name} ({outside.where}) was written to")
        for holder, key in self._set_since():
            if is_among(self._values, holder, key):
                paths = {id(module): path for path, module in self._model.named_modules()}
                raise _changed(f"{in_words(holder.owner, name_of(key), paths)} was set")
        for path, (module, training) in self._modes.items():
            if module.training != training:
                mode = "train" if module.training else "eval"
                raise _changed(f"{f'module {path!r}' if path else 'the model'} was set to {mode}()")

    def _now(self) -> dict[str, Tensor]:
        return dict((*self._model.named_parameters(), *self._model.named_buffers()))


def _state_of(tensor: Tensor) -> tuple[int, int]:
    """Return what tells whether it was written to, or given other values by ``.data``."""
    return version_of(tensor), tensor.data_ptr()


def _changed(what: str) -> StateError:
    return StateError(
        f"{what} between pipe(x) and its backward ({users_line()}), which runs the forward of "
        "recomputed calls again: their activations would be others; run the backward before, or "
        "keep the activations (checkpoint='never')"
    )
