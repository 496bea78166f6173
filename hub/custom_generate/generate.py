"""``model.generate(custom_generate=THIS_FOLDER, trust_remote_code=True)``: exact lookahead decoding."""

from typing import Any

import lookahead


def generate(model: Any, *args: Any, use_lookahead: bool = True, **kwargs: Any) -> Any:
    """Everything that ``generate`` takes, and ``lookahead_strategy``; ``use_lookahead=False`` decodes plainly.

    The process stays augmented afterwards; calls without ``use_lookahead`` still run transformers' own code.
    """
    lookahead.augment_all()
    # Not model.generate: in a model's own folder that is this function.
    return type(model).generate(model, *args, use_lookahead=use_lookahead, **kwargs)
