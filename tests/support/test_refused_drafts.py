"""Draft models and heads that cannot draft: named before any pass of the model, which stays as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eagle import random_network
from helpers.encoder_decoders import seq2seq_model, sources
from helpers.hybrids import fresh_hybrid
from helpers.medusa import random_heads
from helpers.models import F32, fresh_model, letters_tokenizer, prompts, same_as_plain, tiny_model
from helpers.mtp import with_layers
from helpers.redrafter import random_head
from helpers.refusals import Passes, refused, refuses
from torch import nn
from transformers import PreTrainedTokenizerFast

from lookahead import Jacobi, Lookahead
from lookahead.eagle import Eagle, EagleHead
from lookahead.medusa import Medusa
from lookahead.mtp import Mtp, MtpHeads
from lookahead.redrafter import ReDrafter

pytestmark = pytest.mark.usefixtures("self_tested")


def broken(rows: slice = slice(None)) -> Any:
    model = fresh_model("llama", 1)
    with torch.no_grad():
        model.model.embed_tokens.weight[rows] = torch.nan
    return model


def overflowing() -> Any:
    model = fresh_model("llama", 1)
    with torch.no_grad():
        for weight in (model.lm_head.weight, model.model.norm.weight):
            weight.fill_(torch.finfo(weight.dtype).max / 4)
    return model


DRAFTS: dict[str, tuple[Any, str]] = {
    "another vocabulary": (
        lambda: fresh_model("llama", vocab_size=40),
        "has 40 tokens and the model 48; expected the same",
    ),
    "recurrent": (lambda: fresh_hybrid("mamba2", dtype=F32), "the draft model follows no trees .*recurrent"),
    "NaN": (broken, "1536 of 1536 numbers of model.embed_tokens.weight are NaN or infinite; train it again"),
    "NaN in some rows": (lambda: broken(slice(5, 6)), "32 of 1536 numbers of model.embed_tokens.weight are NaN"),
    "NaN logits": (overflowing, "the draft model's logits are NaN; check its weights"),
    "without an output layer": (lambda: fresh_model("llama").model, "LlamaModel has no logits; expected a causal"),
    "elsewhere": (lambda: fresh_model("llama").to("meta"), "on meta and the model on cpu; call draft.to"),
    "encoder-decoder": (lambda: seq2seq_model("bart"), "the draft model BartFor.* is an encoder-decoder model"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_models_that_cannot_draft(name: str, passes: Passes) -> None:
    make, match = DRAFTS[name]
    draft = make()
    refused(passes, tiny_model("llama"), match, lookahead_strategy=Lookahead(draft_model=draft))
    refused(passes, tiny_model("llama"), match, assistant_model=draft)
    same_as_plain(tiny_model("llama"), prompts(1), max_new_tokens=8)


def test_a_draft_model_that_breaks_after_its_first_use(passes: Passes) -> None:
    draft = fresh_model("llama", 1)
    same_as_plain(tiny_model("llama"), prompts(1), Lookahead(draft_model=draft), max_new_tokens=8)
    with torch.no_grad():
        draft.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    refused(passes, tiny_model("llama"), "1 of .*down_proj.weight are NaN", assistant_model=draft)


def test_layers_that_there_are_not(passes: Passes) -> None:
    for layers in (0, 2, 7):
        match = f"LlamaForCausalLM has 2 layers: expected an early exit after 1 to 1, got {layers}"
        refused(passes, tiny_model("llama"), match, assistant_early_exit=layers)
        refused(passes, tiny_model("llama"), match, lookahead_strategy=Lookahead(draft_model=layers))


def test_an_encoder_decoder_model_has_no_draft_model(passes: Passes) -> None:
    model = seq2seq_model("bart")
    strategy = Lookahead(draft_model=tiny_model("llama"))
    refused(
        passes,
        model,
        "the model BartFor.* is an encoder-decoder",
        sources("bart", 1, 6, 0),
        lookahead_strategy=strategy,
    )


def test_tokenizers_without_a_common_token(passes: Passes) -> None:
    from tokenizers import Tokenizer, models

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"1": 0, "2": 1}, "1")), unk_token="1")
    given = {"assistant_model": tiny_model("gpt2"), "tokenizer": letters_tokenizer(), "assistant_tokenizer": other}
    refused(passes, tiny_model("llama"), "the two tokenizers have no token in common", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"assistant_tokenizer": letters_tokenizer()},
        {"tokenizer": "gpt2", "assistant_tokenizer": "gpt2"},
        {"tokenizer": letters_tokenizer(), "assistant_tokenizer": 3},
    ],
    ids=["one is missing", "names", "no tokenizer"],
)
def test_tokenizers_that_are_none(given: dict[str, Any], passes: Passes) -> None:
    match = r"tokenizers=\) must be the model's tokenizer .* got \[.* give tokenizer= and assistant_tokenizer="
    refused(passes, tiny_model("llama"), match, assistant_model=tiny_model("gpt2"), **given)


def test_two_that_draft(passes: Passes) -> None:
    match = "assistant_early_exit and assistant_model both say what drafts: drop one"
    refused(passes, tiny_model("llama"), match, assistant_model=tiny_model("gpt2"), assistant_early_exit=1)
    refused(passes, tiny_model("llama"), "use_mtp must be True or False: got 'yes' of type str", use_mtp="yes")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_wrapped_models_draft_as_what_is_inside() -> None:
    """PEFT's and torch.compile's; others are named by their class only."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(fresh_model("llama", 1), peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    for draft in (adapted, torch.compile(fresh_model("llama", 1)), torch.compile(adapted)):
        strategy = Lookahead(draft_model=draft, sources=("draft",), nodes=4)
        assert type(strategy.draft_model).__name__ == "LlamaForCausalLM"
        output = same_as_plain(tiny_model("llama"), prompts(3), strategy, max_new_tokens=8)
        assert output.stats.steps
        same_as_plain(tiny_model("llama"), prompts(1), assistant_model=draft, max_new_tokens=8)
    refuses(r"of the model's own layers: got a Linear\.$", Lookahead, draft_model=torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"draft_model": "folder"}, r"draft_model=\) must be a causal model .*got 'folder'"),
        ({"draft_model": True}, r"draft_model=\) must be a causal model"),
        ({"draft_model": 1, "window_size": 3}, r"draft_model=\) belongs to the automatic mode"),
        ({"sources": ("draft", "suffix")}, r"The source 'draft' and a draft_model belong together: got sources="),
        ({"sources": ("suffix",), "draft_model": 1}, "belong together"),
        ({"tokenizers": (1, 2)}, r"tokenizers=\) must be the model's tokenizer and the draft model's"),
        ({"tokenizers": (1, 2), "draft_model": 1}, r"tokenizers=\) must be"),
        ({"tokenizers": 3, "draft_model": tiny_model("llama")}, r"tokenizers=\) must be .* got int and draft_model=Ll"),
        ({"tokenizers": (None, letters_tokenizer()), "draft_model": tiny_model("llama")}, r"got \['NoneType', 'Tok"),
    ],
    ids=range(9),
)
def test_settings(settings: dict[str, Any], match: str) -> None:
    refuses(match, Lookahead, **settings)


def test_strategies_that_take_no_assistant(passes: Passes) -> None:
    draft, match = tiny_model("gpt2"), "takes no assistant_model: expected Lookahead"
    for strategy in (Jacobi(), Lookahead(window_size=3)):
        refused(passes, tiny_model("llama"), match, assistant_model=draft, lookahead_strategy=strategy)
    strategy = Lookahead(draft_model=draft)
    match = "both name a model that drafts"
    refused(passes, tiny_model("llama"), match, assistant_model=draft, lookahead_strategy=strategy)


def pair(kind: str, folder: Path) -> tuple[Any, nn.Module, Any]:
    """A model, a head for it, and how its strategy is made."""
    model = with_layers(folder, "mimo") if kind == "mtp" else fresh_model("llama")
    if kind == "mtp":
        return model, MtpHeads.from_pretrained(model=model), Mtp
    if kind == "eagle":
        return model, EagleHead(random_network(1)), Eagle
    if kind == "redrafter":
        return model, random_head().to(model.dtype), ReDrafter
    return model, random_heads(model), Medusa


NAMES = {
    "eagle": "The EAGLE head is",
    "redrafter": "The ReDrafter head is",
    "mtp": "The MTP layers are",
    "medusa": "[Tt]?he.? heads are",
}


@pytest.mark.parametrize("kind", NAMES)
def test_heads_that_break_in_memory(kind: str, tmp_path: Path, passes: Passes) -> None:
    """Before their first use, or after it."""
    model, head, make = pair(kind, tmp_path)
    strategy = make(head)
    same_as_plain(model, prompts(1), strategy, max_new_tokens=6)
    with torch.no_grad():
        next(iter(head.parameters())).flatten()[3] = torch.nan
    refused(passes, model, f"{NAMES[kind]} broken: 1 of .* are NaN or infinite", lookahead_strategy=strategy)
    refused(passes, model, "broken: 1 of", lookahead_strategy=make(head))


@pytest.mark.parametrize("kind", NAMES)
def test_heads_elsewhere(kind: str, tmp_path: Path, passes: Passes) -> None:
    model, head, make = pair(kind, tmp_path)
    match = "on meta and the model's output layer is on cpu: call .to.'cpu'. on it"
    refused(passes, model, match, lookahead_strategy=make(head.to("meta")))
