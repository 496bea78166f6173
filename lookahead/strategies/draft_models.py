"""Which models may draft for a model, and under which vocabulary."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead._per_model import PerModel, latest
from lookahead.models.early_exit import early_exit
from lookahead.models.families.scans import scanned_layers
from lookahead.models.fingerprint import broken_weight, weights_stamp
from lookahead.models.traits import ModelTraits, tensor_parallel_group
from lookahead.sources.vocabularies import OtherVocabulary, SameVocabulary, Vocabulary, same_but_for_padding
from lookahead.support.route import check_model, route, self_test

Tokenizers = tuple[Any, Any]  # the model's, and the draft model's

_tried: PerModel[dict[Hashable, None]] = PerModel(dict)  # draft models whose logits are numbers
_vocabularies: PerModel[dict[Hashable, OtherVocabulary]] = PerModel(dict)


def draft_model_for(model: PreTrainedModel, given: PreTrainedModel | int) -> PreTrainedModel:
    """The model that drafts: ``given``, or the first so many layers of ``model``."""
    return early_exit(model, given) if isinstance(given, int) else given


def unwrapped(given: Any) -> Any:
    """The model inside of what PEFT and torch.compile make of one. Adapters are in its layers, and stay."""
    while isinstance(given, nn.Module) and not isinstance(given, PreTrainedModel):
        inner = getattr(given, "get_base_model", lambda: None)() or vars(given)["_modules"].get("_orig_mod")
        if inner is None:
            break
        given = inner
    return given


def check_draft_model(model: PreTrainedModel, draft: PreTrainedModel, tokenizers: Tokenizers | None) -> None:
    """Refuse, with a LookaheadError, a draft model that cannot draft for ``model``; nothing of the text is read."""
    if (family := str(draft.config.model_type)).endswith("_assistant"):
        reads = f"{family} reads the model's keys and values, which only transformers' own loop gives it"
        _refuse(reads, "expected a causal model, or a head; drop use_lookahead to draft with it")
    traits, drafts = ModelTraits.of(model), ModelTraits.of(draft)
    for each, what in ((traits, "model"), (drafts, "draft model")):
        if each.is_encoder_decoder:
            _refuse(f"the {what} {each.name} is an encoder-decoder model", "expected causal models")
    if not draft.can_generate():
        _refuse(f"the draft model {drafts.name} has no logits", "expected a causal model, with its output layer")
    if drafts.device != traits.device:
        where = f"the draft model is on {drafts.device} and the model on {traits.device}"
        _refuse(where, f"call draft.to({traits.device})")
    if (broken := broken_weight(draft)) is not None:
        _refuse(broken, "train it again, or load another checkpoint")
    check_model(draft, drafts)
    way, why = route(draft, drafts)
    if scanned_layers(draft, drafts.config):
        why = f"the states of {drafts.name} move only once a pass is decided"
    elif way == "tree":
        why = self_test(draft, drafts, drafts=True)
    if why is not None:
        _refuse(f"the draft model follows no trees ({why})", "expected a model whose layers are all attention")
    vocabulary_for(model, draft, tokenizers)
    latest(_tried.of(draft), weights_stamp(draft.parameters()), lambda: _check_numbers(draft, drafts))


def vocabulary_for(model: PreTrainedModel, draft: PreTrainedModel, tokenizers: Tokenizers | None) -> Vocabulary:
    """How the tokens of ``model`` are told to the draft model; a LookaheadError if nobody can say."""
    size, draft_size = ModelTraits.of(model).vocab_size, ModelTraits.of(draft).vocab_size
    if tokenizers is None:
        if not same_but_for_padding(size, draft_size):
            _refuse(
                f"the draft model has {draft_size} tokens and the model {size}",
                "expected the same vocabulary, or tokenizer= and assistant_tokenizer= as well",
            )
        return SameVocabulary(size, draft_size)
    tokenizer, theirs = tokenizers
    key = id(tokenizer), id(theirs), size, draft_size
    made = latest(_vocabularies.of(draft), key, lambda: OtherVocabulary(size, draft_size, tokenizer, theirs))
    if not made.shared:
        _refuse("the two tokenizers have no token in common", "expected vocabularies that overlap")
    return made


@torch.no_grad()
def _check_numbers(draft: PreTrainedModel, traits: ModelTraits) -> None:
    """Try the draft model on one token."""
    logits = getattr(draft(torch.zeros((1, 1), dtype=torch.long, device=traits.device)), "logits", None)
    if logits is None:
        _refuse(f"the draft model {traits.name} gives no logits", "expected a causal model, with its output layer")
    elif bool(logits.isnan().any()):
        _refuse("the draft model's logits are NaN", "check its weights and its dtype")


def _refuse(culprit: str, way_out: str) -> None:
    raise LookaheadError(f"This model cannot draft: {culprit}; {way_out}.")


def check_whole(model: Any, what: str) -> None:
    """Refuse a model sharded over ranks, of which rank 0 alone would have to run parts to draft."""
    if tensor_parallel_group(model) is not None:
        raise LookaheadError(
            f"{what} drafts with parts of the model itself, and with tensor parallelism rank 0 alone drafts: expected "
            "the free sources, Medusa's heads, or an assistant_model that is whole on rank 0."
        )
