"""Where tree forwards end and transformers' own steps take over.

Some models change with the length of the text: ``dynamic`` RoPE makes new frequencies for every pass past its limit,
``longrope`` switches its frequencies once (and transformers then recomputes the whole text), indexed sparse attention
begins to leave out tokens. From that very token on, each pass has to be the one that plain decoding makes: one token in
every sequence, prepared by the model's own ``prepare_inputs_for_generation``.
"""

from collections.abc import Sequence

from lookahead.models.traits import ModelTraits


def boundary(traits: ModelTraits, past: int, last_positions: Sequence[int]) -> tuple[int, str] | None:
    """The first slot whose token needs a step of transformers' own, and why; None = no slot does.

    Args:
        traits: the model's.
        past: slots of the prompt.
        last_positions: of each sequence's last prompt token.
    """
    slots: list[tuple[int, str]] = []
    if traits.rope_limit is not None:
        kind, limit = traits.rope_limit
        highest, why = max(last_positions), f"{kind} RoPE changes at position {limit}"
        if kind == "dynamic" or highest < limit:
            slots.append((past + max(0, limit - 1 - highest), why))
            if kind == "longrope" and past <= limit:
                slots.append((limit, why))  # Phi-3 recomputes where the slots, padding included, pass the limit
    if traits.index_limit is not None:
        slots.append((max(past, traits.index_limit), f"attention leaves out tokens past {traits.index_limit}"))
    return min(slots, default=None)
