"""Conversations as prompts: a tokenizer's chat template, or a plain one for models that have none."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from jacobi import LookaheadError

# For base models, which continue text: every message is a paragraph under the name of its role.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], template: str | None = None) -> list[int]:
    """The token ids of a conversation, up to where the assistant's next message begins.

    Args:
        messages: each with ``role`` and ``content``, oldest first.
        template: Jinja, in place of the tokenizer's own; None = the tokenizer's, or :data:`PLAIN_TEMPLATE`.

    Raises:
        LookaheadError: the template refuses the messages, which some do for roles that do not alternate.
    """
    chosen = template or getattr(tokenizer, "chat_template", None) or PLAIN_TEMPLATE
    settings = {"chat_template": chosen, "add_generation_prompt": True, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], **settings)
    except TemplateError as error:
        raise LookaheadError(f"The chat template refuses these messages: {error}.") from error
    # Templates write special tokens themselves; the plain one leaves them to the tokenizer.
    return list(tokenizer(text, add_special_tokens=chosen == PLAIN_TEMPLATE)["input_ids"])
