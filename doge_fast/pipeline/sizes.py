"""The sizes of the paper's model family; with nothing that takes long to import."""

from typing import NamedTuple


class Size(NamedTuple):
    """Layers, attention heads and embedding width; the hidden width is four times the last."""

    num_layers: int
    num_heads: int
    embed_dim: int


SIZES: dict[str, Size] = {
    # To try things: seconds.
    "micro": Size(1, 2, 32),
    # For CPUs: minutes, not hours.
    "tiny": Size(2, 4, 128),
    "mini": Size(3, 6, 192),
    "small": Size(4, 8, 256),
    # Source: DoGE, Table archictectures (the names count a vocabulary of 50304, tied).
    "60M": Size(3, 6, 768),
    "82M": Size(6, 12, 768),
    "124M": Size(12, 12, 768),
    "210M": Size(24, 16, 768),
    "684M": Size(36, 24, 1200),
}
