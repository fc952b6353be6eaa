"""Attention and the Transformer, from the Q, K, V idea to measured kernels: the library of the book.

Every public name can be imported from here and is loaded when it is first asked for.
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING

_PUBLIC = {
    "toolkit": (
        "PALETTE", "check", "compare", "exercise", "heatmap", "interactive", "kept_bytes", "measured", "setup", "show",
        "time_ratio", "train",
    ),
    "recurrence": ("influence", "lstm_cell", "rnn_cell", "unroll"),
    "attention": ("attention_entropy", "scaled_dot_product_attention"),
    "masking": (
        "causal_mask", "combine_masks", "document_mask", "fused_attention", "mask_from_huggingface",
        "mask_from_torch", "padding_mask", "prefix_mask", "to_additive", "window_mask",
    ),
    "multi_head": ("MultiHeadAttention",),
    "positions": (
        "LearnedPositions", "RotaryPositions", "SinusoidalPositions", "alibi_bias", "alibi_slopes", "apply_rotary",
        "positions_from_mask", "reorder_rotary", "sinusoidal_encoding",
    ),
    "transformer": (
        "Decoder", "DecoderLayer", "Encoder", "EncoderLayer", "FeedForward", "KVCache", "Transformer",
        "TransformerConfig",
    ),
    "translation": (
        "Hypothesis", "RECIPES", "Vocabulary", "beam_search", "bleu", "collate", "cross_attention_maps", "date_examples",
        "date_pairs", "fit", "greedy_decode", "keep_likely", "label_smoothed_loss", "load_checkpoint", "load_model",
        "load_multi30k", "load_translator", "noam_schedule", "sample", "save_checkpoint", "token_batches",
        "train_translator", "train_vocabulary", "translate", "validation_loss",
    ),
    "flash_backward": ("flash_attention", "flash_backend"),
    "tiling": ("merge_partials", "online_softmax", "tiled_attention"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

if TYPE_CHECKING:  # for editors and type checkers, to which the lazy half would hide every spelling mistake
    from .attention import *
    from .flash_backward import *
    from .flash_forward import *
    from .masking import *
    from .multi_head import *
    from .positions import *
    from .recurrence import *
    from .tiling import *
    from .toolkit import *
    from .transformer import *
    from .translation import *
else:
    __all__ = sorted(_HOME)

    def __getattr__(name: str):
        if name in _PUBLIC:
            return import_module(f".{name}", __name__)
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PUBLIC})
