"""Names of the KV cache, which transformers 5.24 changed: no version is handed a name that it would warn of."""

import inspect

from transformers import GenerationMixin

_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The KV cache in forwards, masks, model_kwargs and outputs; of Mamba's kin; its length, for embeddings of positions.
CACHE = "cache" if _RENAMED else "past_key_values"
STATE = "cache" if _RENAMED else "cache_params"
CACHE_LENGTH = "cache_length" if _RENAMED else "past_key_values_length"
CACHES = frozenset({"cache", "past_key_values", "cache_params"})  # whatever a caller writes
