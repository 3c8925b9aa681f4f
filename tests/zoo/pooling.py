"""Sentence embeddings as sentence-transformers makes them: an encoder, pooling, a loss of pairs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import huggingface
from .entry import Entry, draw_tokens, named

ENCODERS = ["bert", "mpnet", "distilbert", "electra"]
POOLINGS = ["mean", "cls", "max", "mean_sqrt_len"]


class SentenceEmbedding(nn.Module):
    """An encoder whose token embeddings are pooled under the mask and normalized."""

    def __init__(self, encoder: nn.Module, pooling: str) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.dense = nn.Linear(32, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """One unit vector a text."""
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask.unsqueeze(-1).to(found.dtype)
        if self.pooling == "cls":
            pooled = found[:, 0]
        elif self.pooling == "max":
            pooled = found.masked_fill(mask == 0, -1e9).amax(1)
        else:
            length = mask.sum(1).clamp(min=1e-9)
            length = length.sqrt() if self.pooling == "mean_sqrt_len" else length
            pooled = (found * mask).sum(1) / length
        return F.normalize(self.dense(pooled), dim=-1)


class PairsLoss(nn.Module):
    """One encoder called for both texts of a pair; the other pairs' are the negatives."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss, as a model of Hugging Face returns it."""
        scores = self.embedding(**first) @ self.embedding(**second).T * 20
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))}


def _texts(seed: int) -> dict[str, Tensor]:
    ids = draw_tokens(99, 6, 16).roll(seed, 1)
    lengths = torch.arange(6) % 5 + 6 + seed
    return {"input_ids": ids, "attention_mask": (torch.arange(16) < lengths[:, None]).long()}


def entries() -> list[Entry]:
    """Each pooling on an encoder of its own, and the loss of pairs on the first."""
    import transformers  # noqa: F401

    known = {entry.name: entry for entry in huggingface.entries() if entry.name in ENCODERS}

    def embedding(name: str, pooling: str) -> Callable[[], nn.Module]:
        return lambda: SentenceEmbedding(known[name].build().base_model, pooling)

    found = [
        Entry(f"{pooling}, {name}", embedding(name, pooling), named(lambda: _texts(0)))
        for name, pooling in zip(ENCODERS, POOLINGS, strict=True)
    ]
    pairs = Entry(
        "pairs, bert",
        lambda: PairsLoss(embedding("bert", "mean")()),
        named(lambda: {"first": _texts(0), "second": _texts(1)}),
    )
    return [*found, pairs]
