"""The sizes of the paper's model family, and the default training settings of each.

Imports nothing heavy.
"""

from typing import Literal, NamedTuple


class Settings(NamedTuple):
    """Default settings of a training."""

    block_size: int = 128
    """Tokens in a block."""
    sequences_per_domain: int = 4
    """Blocks of every domain in a step of a proxy."""
    batch_size: int = 28
    """Blocks in a step of a base model, over all domains."""
    learning_rate: float = 5e-4
    """Peak of the schedule."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end of the schedule."""
    gpu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the arithmetic on a GPU; it is float32 elsewhere."""


# Source: DoGE, section universal-exp (blocks, batch) and appendix model-archs (rates). A batch of
# 128 has 18 blocks of each of seven domains. The number is per domain, so that the noise of a
# domain's gradient does not depend on the number of domains.
_PAPER = Settings(512, 18, 128, gpu_dtype="bfloat16")


class Size(NamedTuple):
    """Layers, attention heads and embedding width; the hidden width is four times `embed_dim`."""

    num_layers: int
    num_heads: int
    embed_dim: int
    settings: Settings = Settings()


SIZES: dict[str, Size] = {
    # To try things: seconds.
    "micro": Size(1, 2, 32),
    # For CPUs: minutes, not hours.
    "tiny": Size(2, 4, 128),
    "mini": Size(3, 6, 192),
    "small": Size(4, 8, 256),
    # Source: DoGE, Table archictectures (the names include a tied vocabulary of 50304).
    "60M": Size(3, 6, 768, _PAPER),
    "82M": Size(6, 12, 768, _PAPER),
    "124M": Size(12, 12, 768, _PAPER),
    "210M": Size(24, 16, 768, _PAPER),
    "684M": Size(36, 24, 1200, _PAPER._replace(learning_rate=1.5e-4, min_learning_rate=5e-5)),
}


def settings_of(model: str) -> Settings:
    """The settings of a size; another model has those of the small sizes."""
    return SIZES[model].settings if model in SIZES else Settings()
