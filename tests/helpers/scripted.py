"""A model that answers what a script says, and a template that writes tools as Hermes has them."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from helpers.models import SIZES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END = "<end>"
# The last letter of a conversation stands last in the prompt, and picks the answer.
LAST = "{% if add_generation_prompt %}<assistant>{{ messages[-1].content[-1:] }}{% endif %}"
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}\n{% endfor %}" + LAST
)


def scripted(answers: dict[str, str], template: str = HERMES, special: Sequence[str] = ()) -> tuple[Any, Any]:
    """A model and a tokenizer; ``answers`` are by the last letter of the conversation. Each token of an answer is its
    own, and the model knows the next one by the last: its layers add nothing. Texts do not show ``special`` tokens."""
    letters = bytes_to_unicode()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters.values()))}
    chains = []
    for first, text in answers.items():
        pieces = _pieces(text, special, vocabulary, letters)
        chains.append([vocabulary[first], *(vocabulary.setdefault(piece, len(vocabulary)) for piece in pieces)])
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, chat_template=template)
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    own = {"vocab_size": len(tokenizer), "eos_token_id": end, "max_position_embeddings": 4096}
    model = LlamaForCausalLM(LlamaConfig(**SIZES | own | {"hidden_size": 64, "tie_word_embeddings": False})).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.zero_()
        for chain in chains:
            for token, following in zip(chain, [*chain[1:], end], strict=True):
                model.lm_head.weight[following] += model.model.embed_tokens.weight[token]
    return model, tokenizer


def _pieces(text: str, special: Sequence[str], used: Collection[str], letters: dict[int, str]) -> list[str]:
    """The text in pieces of two characters and more that are not used yet, as short as can be."""
    marks = "|".join(map(re.escape, special)) or "(?!)"
    pieces: list[str] = []
    for part in re.split(f"({marks})", text):
        piece = ""
        for letter in () if part in special else part:
            piece += "".join(letters[byte] for byte in letter.encode())
            if len(piece) > 1 and piece not in {*used, *pieces}:
                pieces.append(piece)
                piece = ""
        while piece and (len(piece) == 1 or piece in {*used, *pieces}):
            piece = pieces.pop() + piece
        pieces += [part] if part in special else [piece] * bool(piece)
    return pieces
