"""Where tree forwards end and transformers' own steps take over.

Some models change with the length of the text: ``dynamic`` RoPE makes new frequencies for every pass past its limit,
``longrope`` switches its frequencies once (and transformers then recomputes the whole text), indexed sparse attention
begins to leave out tokens. From that very token on, each pass has to be the one that plain decoding makes: one token in
every row, prepared by the model's own ``prepare_inputs_for_generation``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel


def rope_settings(config: Any) -> Iterator[dict[str, Any]]:
    """A config's RoPE settings: one set, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield from rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]


def position_limit(model: PreTrainedModel) -> tuple[str, int] | None:
    """The first position at which RoPE changes with the text's length, and the kind of RoPE; None = it does not."""
    config = model.config.get_text_config()
    table = getattr(config, "max_position_embeddings", None)
    for rope in rope_settings(config):
        kind = rope.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        original = None
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
        return kind, int(original or table or 0)
    return None


def index_limit(model: PreTrainedModel) -> int | None:
    """How many tokens are attended to where a model leaves out the rest (indexed attention, Doge's dynamic mask).

    Up to that many, the choice is "all of them". Past it, ties are broken by the tokens' slots.

    Returns:
        None where all tokens are attended to.
    """
    config = model.config.get_text_config()
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        return int(getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None) or 0)
    kept = getattr(config, "keep_window_size", None)
    return kept if isinstance(kept, int) else None


def boundary(model: PreTrainedModel, past: int, last_positions: Sequence[int]) -> tuple[int, str] | None:
    """The first slot whose token needs a plain pass, and why; None = no slot does.

    Args:
        model: the model.
        past: slots of the prompt.
        last_positions: of each row's last prompt token.
    """
    slots: list[tuple[int, str]] = []
    rope = position_limit(model)
    if rope is not None:
        kind, limit = rope
        highest = max(last_positions)
        if kind == "dynamic" or highest < limit:
            slots.append((past + max(0, limit - 1 - highest), f"{kind} RoPE changes at position {limit}"))
            if (
                kind == "longrope" and past <= limit
            ):  # Phi-3 recomputes where the slots, padding included, pass the limit
                slots.append((limit, slots[-1][1]))
    topk = index_limit(model)
    if topk is not None:
        slots.append((max(past, topk), f"attention leaves out tokens past {topk}"))
    return min(slots, default=None)
