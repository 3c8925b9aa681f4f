"""A model and its inputs from words of a command line.

A model is named as in an entry point, ``module:callable``, and built on the meta device where that
is enough; an input is its sizes, ``8,3,224,224``. Nothing is evaluated but Python literals.
"""

import ast
import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._common.checks import did_you_mean
from ..errors import UsageError

_TENSOR = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<sizes>[^:=]*)(?::(?P<rest>.*))?")


MOST_DIGITS = 12
"""The most digits of an integer. Python itself refuses to read one of thousands."""

MOST_VALUES = 1 << 28
"""The most values of an input; a larger one has a shape only, which a recording is content with."""

_WHOLE = re.compile(rf"\s*[0-9]{{1,{MOST_DIGITS}}}\s*")


class CommandLineError(UsageError):
    """The words of a command line are wrong."""


class ModelInputs(NamedTuple):
    """The arguments of the model's forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_callable(text: str) -> Callable[..., Any]:
    """Return the object of ``module:name``: a class, a function, or a module that exists already.

    Raises:
        CommandLineError: the module or the name does not exist (with near misses), or the object
            cannot be called.

    Example:
        >>> find_callable("torch.nn:Linear").__name__
        'Linear'
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise CommandLineError(
            f"expected module:callable for the model, got {text!r}; write "
            "torchvision.models:resnet50, for example"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise CommandLineError(f"{text!r} does not import: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found))
            raise CommandLineError(f"{module_name!r} has no {name!r}; {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise CommandLineError(
            f"expected a class or a function that makes a model, got {type(found).__name__} "
            f"from {text!r}"
        )
    return found  # type: ignore[no-any-return]


def build_model(text: str, arguments: Mapping[str, Any], *, meta: bool) -> nn.Module:
    """Make the model that ``module:callable`` names.

    Args:
        text: the name.
        arguments: the keyword arguments of the call.
        meta: whether to build it on the meta device, without memory. A model that reads values
            while it is built is built on the CPU instead.

    Raises:
        CommandLineError: the result is not an ``nn.Module``.
    """
    make = find_callable(text)
    if isinstance(make, nn.Module):
        return make
    model = None
    if meta:
        try:
            with torch.device("meta"):
                model = make(**arguments)
        except Exception:
            model = None  # built on the CPU below, where a real error shows again
    if model is None:
        model = make(**arguments)
    if not isinstance(model, nn.Module):
        raise CommandLineError(f"expected an nn.Module from {text!r}, got {type(model).__name__}")
    return model


def literals(words: Iterable[str], option: str) -> dict[str, Any]:
    """Read ``NAME=VALUE`` pairs, where a value is a Python literal, or else text.

    Example:
        >>> literals(["weights=None", "kind=small"], "--model-arg")
        {'weights': None, 'kind': 'small'}
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise CommandLineError(f"expected NAME=VALUE for {option}, got {word!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def whole_number(word: str) -> int | None:
    """Read an integer of up to :data:`MOST_DIGITS` digits; ``None`` if the word is not one.

    Example:
        >>> whole_number(" 12"), whole_number("-1"), whole_number("9" * 5000)
        (12, None, None)
    """
    return int(word) if _WHOLE.fullmatch(word) else None


def begins(words: Iterable[str]) -> dict[str, int]:
    """Read ``PATH=STAGE`` pairs.

    Example:
        >>> begins(["layer3=1"])
        {'layer3': 1}
    """
    found = {}
    for word in words:
        path, equals, text = word.rpartition("=")
        stage = whole_number(text)
        if not equals or not path or stage is None:
            raise CommandLineError(f"expected PATH=STAGE (layer3=1) for --begin, got {word!r}")
        if path in found:
            raise CommandLineError(f"--begin {path} is given twice")
        found[path] = stage
    return found


def make_inputs(words: Iterable[str], others: Mapping[str, Any]) -> ModelInputs:
    """Make the forward's arguments: tensors from their sizes, and other keyword arguments.

    A tensor is ``[NAME=]SIZES[:DTYPE[:HIGH]]``: ``8,3,224,224``, or ``input_ids=4,128:int64:1000``
    for integers below 1000 (below 2 without a limit). Values are random, from seed 0.

    Raises:
        CommandLineError: a word does not describe a tensor.

    Example:
        >>> make_inputs(["2,3", "mask=2:bool"], {}).kwargs["mask"].dtype
        torch.bool
    """
    generator = torch.Generator().manual_seed(0)
    args: list[Tensor] = []
    kwargs: dict[str, Any] = dict(others)
    for word in words:
        name, tensor = _tensor(word, generator)
        if name is None:
            args.append(tensor)
        elif name in kwargs:
            raise CommandLineError(f"{name!r} is given twice")
        else:
            kwargs[name] = tensor
    return ModelInputs(tuple(args), kwargs)


def _tensor(word: str, generator: torch.Generator) -> tuple[str | None, Tensor]:
    match = _TENSOR.fullmatch(word)
    sizes = match["sizes"].split(",") if match and match["sizes"] else []
    shape = [size for size in map(whole_number, sizes) if size is not None]
    if match is None or len(shape) < len(sizes):
        raise CommandLineError(
            f"expected [NAME=]SIZES[:DTYPE[:HIGH]] for --input, got {word[:100]!r}; write "
            f"8,3,224,224, or input_ids=4,128:int64:1000, at most {MOST_DIGITS} digits a number"
        )
    kind, _, high = (match["rest"] or "float32").partition(":")
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        known = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
        hint = did_you_mean(kind, known)
        raise CommandLineError(f"expected a dtype of torch in input {word!r}, got {kind!r}; {hint}")
    limit = whole_number(high) if high else 2
    if not limit:
        raise CommandLineError(
            f"expected a positive integer of at most {MOST_DIGITS} digits for the limit in input "
            f"{word[:100]!r}, got {high[:100]!r}"
        )
    is_integral = not (dtype.is_floating_point or dtype.is_complex)
    if high and not is_integral:
        raise CommandLineError(f"input {word!r} has a limit, but its dtype is not one of integers")
    if math.prod(shape) > MOST_VALUES:
        return match["name"], torch.empty(shape, dtype=dtype, device="meta")
    if not is_integral:
        return match["name"], torch.randn(shape, dtype=torch.float32, generator=generator).to(dtype)
    return match["name"], torch.randint(0, limit, shape, generator=generator).to(dtype)
