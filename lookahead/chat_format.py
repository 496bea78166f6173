"""Conversations as prompts: a tokenizer's chat template, or a plain one for models that have none. And the prompts that
are built in. Nothing here needs torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from jacobi import LookaheadError

# For base models, which continue text: every message is a paragraph under the name of its role.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SAID = "Well said."
_BUILT_IN = json.loads((Path(__file__).parent / "assets" / "prompts.json").read_text(encoding="utf-8"))
# The bundled model writes Python. A prompt does not end with a line break, because its tokenizer keeps a line break
# and the indentation that follows it in one token.
PROMPTS: tuple[str, ...] = tuple(_BUILT_IN["code"])
CHAT_QUESTIONS: dict[str, str] = _BUILT_IN["chat"]  # what chat models are asked, by category
CHAT_PROMPTS = tuple(CHAT_QUESTIONS.values())


def built_in(tokenizer: Any, raw: bool = False) -> tuple[str, ...]:
    """The built-in prompts that suit a model: what chat models are asked, where there is a chat template."""
    return CHAT_PROMPTS if getattr(tokenizer, "chat_template", None) and not raw else PROMPTS


def prompt_ids(tokenizer: Any, prompt: str, raw: bool = False) -> list[int]:
    """The token ids of a prompt, in the tokenizer's chat template if it has one, unless ``raw``.

    Raises:
        LookaheadError: the prompt is no text, or has no tokens; or the template refuses it.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python's stand-in for a byte of the command line, or of stdin, that is none
        raise LookaheadError(f"The prompt is not text ({error.reason}): expected UTF-8.") from error
    if raw or not getattr(tokenizer, "chat_template", None):
        tokens = list(tokenizer(prompt)["input_ids"])
    else:
        tokens = render(tokenizer, [{"role": "user", "content": prompt}])
    if not tokens:
        raise LookaheadError("The prompt is empty: expected text of at least one token.")
    return tokens


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], template: str | None = None) -> list[int]:
    """The token ids of a conversation, up to where the assistant's next message begins.

    Args:
        messages: each with ``role`` and ``content``, oldest first.
        template: Jinja, in place of the tokenizer's own; None = the tokenizer's, or :data:`PLAIN_TEMPLATE`.

    Raises:
        LookaheadError: the template refuses the messages, which some do for roles that do not alternate.
    """
    text, special = written(tokenizer, messages, template)
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def written(
    tokenizer: Any, messages: Sequence[Any], template: str | None = None, opens: bool = True, tools: Sequence[Any] = ()
) -> tuple[str, bool]:
    """A conversation as text, and whether the tokenizer is to add special tokens: templates write them themselves, the
    plain one leaves them to it. ``opens``: the assistant's next message begins. ``tools`` are OpenAI's."""
    own = getattr(tokenizer, "chat_template", None)
    chosen = template or (None if own else PLAIN_TEMPLATE)  # None: the tokenizer's, of several the one by default
    settings = {"chat_template": chosen, "add_generation_prompt": opens, "tokenize": False, "tools": tools or None}
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], **settings)
    except (TemplateError, TypeError, ValueError) as error:  # ValueError: of several none is the default
        raise LookaheadError(f"The chat template refuses these messages: {error}.") from error
    return str(text), chosen == PLAIN_TEMPLATE


def end_tokens(model: Any) -> list[int]:
    """The tokens at which a model's texts end, by its generation config."""
    ends = model.generation_config.eos_token_id
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


def context_of(model: Any) -> int | None:
    """Tokens that a model's prompt and answer may have together; None = its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def sampling_of(asked: Any) -> dict[str, Any]:
    """Settings of ``generate`` for how a request's attributes ask to draw; where they say nothing, the model's hold."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    settings = {name: value for name in names if (value := getattr(asked, name, None)) is not None}
    if settings.get("temperature") == 0.0:
        return {"do_sample": False} | {name: settings[name] for name in names[-1:] if name in settings}
    return settings | ({"do_sample": True} if settings.keys() - {"repetition_penalty"} else {})


def turns(model: Any, tokenizer: Any, template: str | None = None) -> tuple[list[int], dict[int, str]]:
    """The tokens that end an assistant's answer: those of the model's generation config, and what the template ends a
    turn with, which some configs lack. And those that must not come from a message, with their texts: special ones, and
    what the template writes around a user's."""
    added = {token: entry.special for token, entry in tokenizer.added_tokens_decoder.items()}
    added |= dict.fromkeys(tokenizer.all_special_ids, True)
    said = [{"role": role, "content": _SAID} for role in ("user", "assistant")]
    try:
        around = written(tokenizer, said[:1], template, opens=False)[0]
        behind = written(tokenizer, said, template, opens=False)[0].rpartition(_SAID)[2].lstrip()
    except LookaheadError:
        around = behind = ""
    first, last = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (around, behind))
    ends = end_tokens(model)
    ends += [token for token in last[:1] if token in added and token not in ends]
    marks = [token for token, special in added.items() if special or token in {*first, *last[:1]}]
    return ends, {token: str(tokenizer.convert_ids_to_tokens(token)) for token in marks}
