"""``python -m blockpipe``: look at a model, cut it, and see what a step does, from a shell.

Exit status: 0, done; 1, it could not be done (one line on stderr says why); 2, wrong usage;
130, interrupted.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from . import __version__
from ._common.callsite import say_caller
from .cli.commands import add_commands
from .cli.model_arguments import CommandLineError
from .errors import BlockpipeError

_EXAMPLES = """\
examples:
  python -m blockpipe summary torchvision.models:resnet50 --input 8,3,224,224 \\
      --begin layer3=1 --begin layer4=2
  python -m blockpipe balance torchvision.models:resnet50 --input 8,3,224,224 --stages 4
  python -m blockpipe simulate --stages 4 --chunks 8 --schedule all
  python -m blockpipe trace torchvision.models:resnet18 --input 16,3,64,64 \\
      --begin layer3=1 --save trace.html
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status.

    Args:
        words: the arguments; ``None``: the process's.

    Example:
        >>> main(["simulate", "--stages", "2", "--schedule", "nonesuch"])
        Traceback (most recent call last):
        SystemExit: 2
    """
    parser = argparse.ArgumentParser(
        prog="python -m blockpipe",
        description="Pipelines of PyTorch models: what is where, where to cut, what happens when.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"blockpipe {__version__}")
    add_commands(parser)
    options = parser.parse_args(words)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without lines to draw tables with
    say_caller("the command line")
    try:
        answer = options.command(options)
        print(answer.text if options.format == "text" else json.dumps(answer.data, indent=1))
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, say) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if options.traceback:
            raise
        kind = "" if isinstance(error, BlockpipeError) else f"{type(error).__name__}: "
        said = f"{kind}{' '.join(str(error).split())}".removesuffix(": ")
        print(f"blockpipe {options.name}: {said}", file=sys.stderr)
        return 2 if isinstance(error, CommandLineError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
