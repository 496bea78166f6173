"""Encoder-decoder models whose steps are not made of the decoder's tokens alone."""

from transformers import PreTrainedModel

# Whose inputs of a step are the last tokens and their positions, and nothing else that depends on the text.
_PREPARES = (
    "CanaryForConditionalGeneration",
    "CohereAsrForConditionalGeneration",
    "GenerationMixin",
    "WhisperForConditionalGeneration",
)
# Decoders whose steps do not heed padding in the decoder's prompt as the prompt's own pass does.
_FORGETFUL = ("led", "nllb-moe")


def own_steps(model: PreTrainedModel) -> str | None:
    """Why an encoder-decoder model makes more of a step than its tokens: of the text, or of other sequences."""
    name = type(model).__name__
    home = type(model).prepare_inputs_for_generation.__qualname__.partition(".")[0]
    if home not in _PREPARES:
        return (
            f"{name} prepares the inputs of each step in its own way ({home}.prepare_inputs_for_generation), which a "
            "pass over several tokens would skip"
        )
    fraction = getattr(model.config, "moe_eval_capacity_token_fraction", 1.0)
    policy = getattr(model.config, "second_expert_policy", "all")
    if fraction < 1.0 or policy != "all":
        return (
            f"{name} chooses experts by chance or by what else is in a pass: expected moe_eval_capacity_token_fraction "
            f"of 1.0 and second_expert_policy 'all' in its config, got {fraction} and {policy!r}"
        )
    return None


def forgets_padding(model: PreTrainedModel) -> bool:
    """Whether plain decoding's steps see what ``decoder_attention_mask`` hides from the prompt's pass."""
    return model.config.model_type in _FORGETFUL
