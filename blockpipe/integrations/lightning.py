"""Lightning: a strategy for modules that contain a pipeline.

Lightning's own strategies move the whole module to one device, and back to the CPU at the end. A
pipeline's stages have devices of their own, so this one moves only the rest of the module.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ModuleNotFoundError(
        f"blockpipe.integrations.lightning needs the package lightning ({error}); "
        "pip install lightning",
        name=error.name,
    ) from error

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.hints import knows_other_names
from ..errors import UsageError
from ..execution.scaled_gradients import scaled_gradients
from ..execution.step_result import StepLoss, StepResult
from ..pipeline import Pipeline

__all__ = ["PipelineStrategy"]


class _NamesInstance(type(SingleDeviceStrategy)):  # type: ignore[misc]
    """A class whose name in an error says to make an instance of it.

    Lightning refuses ``Trainer(strategy=PipelineStrategy)``, and shows what it was given.
    """

    def __repr__(cls) -> str:
        return f"{super().__repr__()}, the class: write {cls.__name__}()"


class PipelineStrategy(SingleDeviceStrategy, metaclass=_NamesInstance):  # type: ignore[misc]
    """A strategy for a ``LightningModule`` with a :class:`~blockpipe.Pipeline`, which is not moved.

    The rest of the module (losses with parameters, metrics) and the batches are on the device of
    the last stage, where outputs are. With ``precision="16-mixed"``, gradients of
    ``forward_backward`` are scaled as Lightning scales those of a loss that ``training_step``
    returns.

    Args:
        device: the device of the rest of the module; ``None`` takes the last stage's device.
        **options: as for Lightning's ``SingleDeviceStrategy``.

    Raises:
        UsageError: the module has no pipeline when a run begins.

    Source: ``lightning.pytorch.strategies.SingleDeviceStrategy``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from blockpipe.integrations.lightning import PipelineStrategy
        >>> trainer = Trainer(strategy=PipelineStrategy(), accelerator="cpu", logger=False)
    """

    @knows_other_names(
        devices="the stages' devices are Pipeline's: self.net = Pipeline(…, devices=[…])",
        chunks="self.net = Pipeline(…, chunks=…) has it",
        pipeline="the strategy finds the pipelines of the module: leave it out",
    )
    def __init__(self, device: Any = None, **options: Any) -> None:
        if isinstance(device, nn.Module):
            raise UsageError(
                expected(
                    "a device, or none,",
                    device,
                    for_="device",
                    fix="leave it out: the strategy finds the pipelines of the module",
                )
            )
        self._follows_pipeline = device is None
        super().__init__("cpu" if device is None else device, **options)

    def setup_environment(self) -> None:
        """Set up as Lightning does, once the device of the last stage is known."""
        pipes = self._pipelines()
        if not pipes:
            raise UsageError(
                f"expected a LightningModule with a Pipeline for PipelineStrategy, got "
                f"{type(self.lightning_module).__name__} without one ({users_line()}); write "
                "self.net = blockpipe.Pipeline(…) in its __init__ or configure_model, or leave the "
                "strategy out"
            )
        if self._follows_pipeline:
            self._root_device = pipes[0].output_device
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move the parts of the module that are not in a pipeline."""
        with self._without_pipelines():
            super().model_to_device()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step; if the precision scales gradients, pipelines do so too.

        Raises:
            UsageError: the step returned a loss of ``forward_backward``, which has no graph.
        """
        scaler = getattr(self.precision_plugin, "scaler", None)
        with nullcontext() if scaler is None else scaled_gradients(scaler.scale):
            output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, StepLoss | StepResult) and self.lightning_module.automatic_optimization:
            raise UsageError(
                "expected a loss with a graph from training_step, got that of forward_backward, "
                "which has run the backward already; set self.automatic_optimization = False in "
                "__init__ and step the optimizer yourself, or return a loss of self.net(x)"
            )
        return output

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load each optimizer's state onto the devices of its parameters."""
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Tear down as Lightning does, without moving anything to the CPU."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _pipelines(self) -> list[Pipeline]:
        module = self.lightning_module
        found = [] if module is None else module.modules()
        return [part for part in found if isinstance(part, Pipeline)]

    @contextmanager
    def _without_pipelines(self) -> Iterator[None]:
        """Take pipelines and their models out of the module during a block."""
        pipes = self._pipelines()
        left = {*pipes, *(pipe.module for pipe in pipes)}
        places: list[tuple[nn.Module, str, nn.Module]] = [
            (parent, name, child)
            for parent in self.lightning_module.modules()
            if parent not in left
            for name, child in parent.named_children()
            if child in left
        ]
        for parent, name, _ in places:
            setattr(parent, name, None)
        try:
            yield
        finally:
            for parent, name, child in places:
                setattr(parent, name, child)
