"""Where the stages of a test's pipeline are: on the CPU, or with ``--simulated`` on the simulated
accelerator."""

import torch


def stages(count: int) -> list[str]:
    """A device for each of so many stages."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "simulated":
        return ["cpu"] * count
    return [f"simulated:{stage % torch.accelerator.device_count()}" for stage in range(count)]
