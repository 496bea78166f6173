"""Two vocabularies: which tokens stand for each other, and what is read and proposed of the others."""

from typing import Any

import numpy as np
import pytest
from helpers.models import VOCAB, fresh_model, letters_tokenizer, prompts, same_as_plain, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead import Lookahead
from lookahead.sources.vocabularies import OtherVocabulary, SameVocabulary, spellings


def pieces_tokenizer() -> Any:
    """Letters from z to a as SentencePiece writes them, with spaces, bytes and the pair ``ab``."""
    letters = [chr(code) for code in range(ord("z"), ord("a") - 1, -1)]
    words = ["<unk>", "</s>", "\u2581", *letters, "ab", "<0x0A>", "é"]
    tokenizer = Tokenizer(
        models.BPE({word: token for token, word in enumerate(words)}, [("a", "b")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_spellings_are_bytes() -> None:
    theirs, ours = spellings(pieces_tokenizer()), spellings(letters_tokenizer())
    assert theirs[b" "] == 2
    assert theirs[b"z"] == 3
    assert theirs[b"\n"] == 30
    assert theirs["é".encode()] == 31
    assert 0 not in theirs.values()
    assert ours[b"a"] == 1
    assert ours[b" "] == 27


def test_tokens_that_are_spelt_alike_stand_for_each_other() -> None:
    ours, theirs = letters_tokenizer(), pieces_tokenizer()
    vocabulary = OtherVocabulary(VOCAB, 32, ours, theirs)
    assert vocabulary.shared == 27  # letters and the space
    assert vocabulary.fed(1) == (28,)  # a
    assert vocabulary.fed(27) == (2,)  # a space
    hi = ours.convert_tokens_to_ids("hi")
    assert vocabulary.fed(hi) == (21, 20)  # is spelt
    assert vocabulary.fed(0) == (0,)  # a special token: something has to be fed
    assert vocabulary.prompt([1, 2, hi]) == [29, 21, 20]  # ab is one token there
    tokens, logits = vocabulary.proposed(np.array([28, 29, 2, 31, 50]), np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
    assert tokens.tolist() == [1, 27]
    assert logits.tolist() == [5.0, 3.0]


def test_padding_is_neither_fed_nor_proposed() -> None:
    vocabulary = SameVocabulary(48, 40)
    assert vocabulary.prompt([1, 45, 39]) == [1, 0, 39]
    tokens, logits = SameVocabulary(40, 48).proposed(np.array([41, 3]), np.array([2.0, 1.0]))
    assert (tokens.tolist(), logits.tolist()) == ([3], [1.0])


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_model_with_another_tokenizer_drafts(sample: bool) -> None:
    draft = fresh_model("llama", 2, vocab_size=32)
    tokenizers = {"tokenizer": letters_tokenizer(), "assistant_tokenizer": pieces_tokenizer()}
    model = tiny_model("llama")
    for batch in (1, 2):
        output = same_as_plain(
            model,
            prompts(batch),
            Lookahead(nodes=8, seed=0, sources=("draft",), draft_model=draft, tokenizers=tuple(tokenizers.values())),
            do_sample=sample,
            max_new_tokens=30,
        )
        assert output.stats.drafted > 20
