"""peft: adapters on causal models of Hugging Face, whose own weights are frozen."""

from collections.abc import Callable
from typing import Any

from torch import nn

from . import huggingface
from .entry import Entry

MODELS = ["gpt2", "llama", "gemma2"]
# By name: the configuration's class and options. Random initial values: zeros would hide gradients.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "init_lora_weights": False}),
    "dora": ("LoraConfig", {"r": 4, "init_lora_weights": False, "use_dora": True}),
    "ia3": ("IA3Config", {"init_ia3_weights": False}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}


def entries() -> list[Entry]:
    """LoRA on each model, and the other adapters on one."""
    import peft

    causal = {entry.name: entry for entry in huggingface.entries() if entry.name in MODELS}

    def build(model: str, adapter: str) -> Callable[[], nn.Module]:
        name, options = ADAPTERS[adapter]

        def make() -> nn.Module:
            config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
            return peft.get_peft_model(causal[model].build(), config).train()

        return make

    pairs = [(model, "lora") for model in MODELS]
    pairs += [("llama", adapter) for adapter in ADAPTERS if adapter != "lora"]
    return [
        Entry(f"{adapter}, {model}", build(model, adapter), causal[model].batch)
        for model, adapter in pairs
    ]
