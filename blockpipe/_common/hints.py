"""Names from other libraries, for errors that give Blockpipe's name.

The names are those of the libraries that people come from, and of the model that a pipeline holds.
Accepting them would be a second way to say everything: they are only understood.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from torch import nn

from .._torch.modules import buffers_of, children_of, parameters_of
from ..errors import UsageError
from .callsite import users_line
from .checks import did_you_mean, near_miss

P = ParamSpec("P")
R = TypeVar("R")

REPLICATED = """put a ReplicatedPipeline around the pipeline of each process:

    pipe = blockpipe.distributed.ReplicatedPipeline(blockpipe.Pipeline(model, …))
    pipe.forward_backward(x, target=y, loss_fn=loss_fn)  # its share; gradients are those of all
    optimizer.step()
"""


def knows_other_names(**meant: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that people call with other arguments than it has.

    Its error for a name that it does not have names what may have been meant, and its error for too
    many arguments by position, how to pass them.

    Args:
        **meant: for the name of an argument elsewhere, the remedy that the error names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function).parameters.values()
        known = {p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in own)
        by_position = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        by_name = [p.name for p in own if p.kind is p.KEYWORD_ONLY]
        what = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= known:
                for name in kwargs:
                    if name in meant or (name not in known and not takes_any):
                        near = near_miss(name, meant) or ""
                        hint = meant.get(name) or meant.get(near)
                        hint = hint or did_you_mean(name, sorted(known - {"self"}))
                        raise UsageError(
                            f"{what}() got an unexpected keyword argument {name!r} "
                            f"({users_line()}); {hint}"
                        )
            if len(args) > len(by_position):
                names = ", ".join(name for name in by_position if name != "self")
                rest = ", ".join(f"{name}=…" for name in by_name[:3])
                raise UsageError(
                    f"{what}() takes ({names}) by position, and got more arguments "
                    f"({users_line()})" + (f"; pass the others by name: {rest}" if rest else "")
                )
            return function(*args, **kwargs)

        return call

    return decorate


_ELSEWHERE = {
    "backward": "forward_backward(…) runs it, and leaves gradients in .grad",
    "step": "call forward_backward(…), and then step() of the optimizer",
    "train_batch": "call forward_backward(…), and then step() of the optimizer",
    "train_step": "call forward_backward(…), and then step() of the optimizer",
    "fit": "write the loop: forward_backward(…), and then step() of the optimizer",
    "eval_step": "call the pipeline under torch.no_grad()",
    "eval_batch": "call the pipeline under torch.no_grad()",
    "evaluate": "call the pipeline under torch.no_grad()",
    "predict": "call the pipeline under torch.no_grad()",
    "save": "torch.save(pipe.state_dict(), path), or pipe.save_weights(directory)",
    "save_checkpoint": "torch.save(pipe.state_dict(), path), or pipe.save_weights(directory)",
    "load_checkpoint": "pipe.load_state_dict(torch.load(path)), or pipe.load_weights(path)",
    "loss_fn": "it is an argument of forward_backward(…, target=…, loss_fn=…)",
    "optimizer": "a pipeline has none; make one over pipe.parameters()",
    "loss": "it is in the result of forward_backward(…): result.loss",
    "partitions": "the stages are in pipe.summary(…), and their devices in pipe.devices",
    "stages": "they are in pipe.summary(…), and their devices in pipe.devices",
    "num_stages": "their number is pipe.plan.num_stages, after the first call",
    "microbatches": "their number is pipe.chunks",
    "n_microbatches": "their number is pipe.chunks",
    "device": "there is one for each stage: pipe.devices, pipe.input_device, pipe.output_device",
}
"""What a pipeline has under another name, by that of another library."""


def what_is_meant(name: str, known: Iterable[str]) -> str | None:
    """Return what an attribute that nobody has may have been meant to be; ``None``: no idea.

    Args:
        name: as the user wrote it.
        known: the names that there are.
    """
    if name.startswith("_"):
        return None
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    near = near_miss(name, known)
    return None if near is None else f"did you mean {near!r}?"


def lacking(module: str, name: str, instead: Mapping[str, str], known: Iterable[str]) -> str:
    """Return the text of the error for a name that a module with another library's names lacks.

    Args:
        module: its own name.
        name: as the user wrote it.
        instead: what to use in the place of the names that it lacks.
        known: the names that it has.
    """
    near = near_miss(name, known)
    hint = instead.get(name) or (f"did you mean {near!r}?" if near is not None else "")
    return f"module {module!r} has no attribute {name!r}" + (hint and f"; {hint}")


def for_trainer(asking: str) -> str | None:
    """Return what to pass a trainer of Hugging Face's in the place of a pipeline, of which it asks
    what a model has; ``None``: somebody else asks.

    Args:
        asking: the name of the module whose code asks.
    """
    if not asking.startswith(("transformers.trainer", "trl.")):
        return None
    return (
        "this trainer takes the plain model: derive one that makes a pipeline of it, class "
        "PipelineSFTTrainer(PipelineTrainerMixin, SFTTrainer) for example, with the mixin of "
        "blockpipe.integrations.transformers"
    )


def where_model_has(model: nn.Module | None, name: str) -> str | None:
    """Return how to reach an attribute of a pipeline's model; ``None``: it has none of that name.

    No property is evaluated: it may fail or be slow.
    """
    if model is None or name.startswith("_"):
        return None
    slots = (model.__dict__, children_of(model), parameters_of(model), buffers_of(model))
    if any(name in names for names in slots):
        return f"the model has it: pipe.module.{name}"
    try:
        found = inspect.getattr_static(type(model), name)
    except AttributeError:
        return None
    if callable(found) or isinstance(found, classmethod | staticmethod):
        return (
            f"the model has that method: pipe.run(pipe.module.{name}, …) where it runs the model, "
            f"pipe.module.{name}(…) where it does not"
        )
    return f"the model has it: pipe.module.{name}"
