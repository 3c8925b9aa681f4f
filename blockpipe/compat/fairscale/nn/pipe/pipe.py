"""``Pipe``, which differs from torchgpipe's ``GPipe`` by its name."""

from ....torchgpipe.gpipe import GPipe


class Pipe(GPipe):
    """A sequential module as a pipeline, in fairscale's words.

    Arguments, attributes and errors are those of :class:`blockpipe.compat.torchgpipe.GPipe`.

    Source: ``fairscale.nn.Pipe``, which follows torchgpipe.

    Example:
        >>> import torch
        >>> from blockpipe.compat import fairscale
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> model = fairscale.nn.Pipe(net, balance=[2, 1], devices=["cpu", "cpu"], chunks=2)
        >>> model(torch.ones(4, 4)).mean().backward()
        >>> model.partitions[1][0] is net[2]
        True
    """
