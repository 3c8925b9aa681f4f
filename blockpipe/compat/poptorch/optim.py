"""PopTorch's module of optimizers, whose import fails with the remedy: torch's take its place."""

# Without its name: an error of that name would be lost in `from blockpipe.compat.poptorch import …`
raise ModuleNotFoundError(
    f"there is no module {__name__!r}; use torch.optim: any of its optimizers works "
    "(from torch.optim import AdamW)"
)
