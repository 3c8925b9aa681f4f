"""A model and its inputs from words of a command line.

A model is named as in an entry point, ``module:callable``, and built on the meta device where that
is enough; an input is its sizes, ``8,3,224,224``. Nothing is evaluated but Python literals.
"""

import ast
import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UsageError

_TENSOR = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<sizes>[^:=]*)(?::(?P<rest>.*))?")


MOST_DIGITS = 12
"""Of a whole number in words. Python itself refuses to read one of thousands."""

MOST_VALUES = 1 << 28
"""Of an input with values; a larger one has a shape only, which is what a recording asks for."""

_WHOLE = re.compile(rf"\s*[0-9]{{1,{MOST_DIGITS}}}\s*")


class CommandLineError(UsageError):
    """Words of a command line that cannot be meant."""


class ModelInputs(NamedTuple):
    """What is passed to the model's forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_callable(text: str) -> Callable[..., Any]:
    """What ``module:name`` stands for: a class, a function, or a module that is built already.

    Raises:
        CommandLineError: no such module or name (with near misses), or nothing that can be called.

    Example:
        >>> find_callable("torch.nn:Linear").__name__
        'Linear'
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise CommandLineError(
            f"a model is given as module:callable, but {text!r} came; write "
            "torchvision.models:resnet50, say"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise CommandLineError(f"{text!r} does not import: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise CommandLineError(f"{module_name!r} has no {name!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise CommandLineError(
            f"{text!r} is {type(found).__name__}, but a model is a class or a function that makes "
            "one"
        )
    return found  # type: ignore[no-any-return]


def build_model(text: str, arguments: Mapping[str, Any], *, meta: bool) -> nn.Module:
    """Call what ``module:callable`` names.

    Args:
        text: the name.
        arguments: keyword arguments of the call.
        meta: build it on the meta device, without memory. A model that reads values while it is
            built is built on the CPU instead.

    Raises:
        CommandLineError: it makes no ``nn.Module``.
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
            model = None  # built below; what is wrong with it shows there
    if model is None:
        model = make(**arguments)
    if not isinstance(model, nn.Module):
        raise CommandLineError(f"{text!r} returned {type(model).__name__}, not an nn.Module")
    return model


def literals(words: Iterable[str], option: str) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; a value is a Python literal, or else text.

    Example:
        >>> literals(["weights=None", "kind=small"], "--model-arg")
        {'weights': None, 'kind': 'small'}
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise CommandLineError(f"{option} takes NAME=VALUE, but {word!r} came")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def whole_number(word: str) -> int | None:
    """The number that a word of up to :data:`MOST_DIGITS` digits is; ``None``: it is no such word.

    Example:
        >>> whole_number(" 12"), whole_number("-1"), whole_number("9" * 5000)
        (12, None, None)
    """
    return int(word) if _WHOLE.fullmatch(word) else None


def begins(words: Iterable[str]) -> dict[str, int]:
    """``PATH=STAGE`` pairs.

    Example:
        >>> begins(["layer3=1"])
        {'layer3': 1}
    """
    found = {}
    for word in words:
        path, equals, text = word.rpartition("=")
        stage = whole_number(text)
        if not equals or not path or stage is None:
            raise CommandLineError(f"--begin takes PATH=STAGE (layer3=1), but {word!r} came")
        if path in found:
            raise CommandLineError(f"--begin {path} is given twice")
        found[path] = stage
    return found


def make_inputs(words: Iterable[str], others: Mapping[str, Any]) -> ModelInputs:
    """The forward's arguments: tensors by their sizes, and other keyword arguments.

    A tensor is ``[NAME=]SIZES[:DTYPE[:HIGH]]``: ``8,3,224,224``, or ``input_ids=4,128:int64:1000``
    for whole numbers below 1000 (below 2 where no limit is given). Values are random, from seed 0.

    Raises:
        CommandLineError: a word that is no such tensor.

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
            f"an input is [NAME=]SIZES[:DTYPE[:HIGH]], but {word[:100]!r} came; write 8,3,224,224, "
            f"or input_ids=4,128:int64:1000; numbers have {MOST_DIGITS} digits at the most"
        )
    kind, _, high = (match["rest"] or "float32").partition(":")
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        near = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
        hint = get_close_matches(kind, near, n=3)
        raise CommandLineError(
            f"{kind!r} in input {word!r} is no dtype of torch"
            + (f"; did you mean {', '.join(hint)}?" if hint else "")
        )
    limit = whole_number(high) if high else 2
    if not limit:
        raise CommandLineError(
            f"the limit in input {word[:100]!r} is a whole number from 1 on, of {MOST_DIGITS} "
            f"digits at the most, not {high[:100]!r}"
        )
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if high and not is_whole:
        raise CommandLineError(f"input {word!r} is not of whole numbers, and takes no limit")
    if math.prod(shape) > MOST_VALUES:
        return match["name"], torch.empty(shape, dtype=dtype, device="meta")
    if not is_whole:
        return match["name"], torch.randn(shape, dtype=torch.float32, generator=generator).to(dtype)
    return match["name"], torch.randint(0, limit, shape, generator=generator).to(dtype)
