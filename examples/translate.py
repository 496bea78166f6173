"""Translate with hybrid Jacobi decoding: a Marian model that is trained in about a minute, here and now.

The task is made up: English number words to German ones, which put units before tens.
"""

import random
import sys

import torch
from transformers import MarianConfig, MarianMTModel

from lookahead import Jacobi, augment_all, restore_all

UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EINER = ["ein", "zwei", "drei", "vier", "fuenf", "sechs", "sieben", "acht", "neun"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ZEHNER = ["zwanzig", "dreissig", "vierzig", "fuenfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
WORDS = ["<pad>", "</s>", *UNITS, *TENS, "thousand", "hundred", "plus", *EINER, *ZEHNER, "tausend", "hundert", "und"]
IDS, PAD, END = {word: place for place, word in enumerate(WORDS)}, 0, 1
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 500


def number(rng: random.Random) -> tuple[list[str], list[str]]:
    m, h, t, u = (rng.randrange(places) for places in (9, 9, 8, 9))
    english = [UNITS[m], "thousand", UNITS[h], "hundred", TENS[t], UNITS[u]]
    return english, [EINER[m], "tausend", EINER[h], "hundert", EINER[u], "und", ZEHNER[t]]


def batch(rng: random.Random, rows: int, terms: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    lines: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for _ in range(rows):
        numbers = [number(rng) for _ in range(rng.randint(1, terms))]
        for side in (0, 1):
            words = [word for pair in numbers for word in ["plus", *pair[side]]][1:]
            lines[side].append(torch.tensor([IDS[word] for word in [*words, "</s>"]]))
    return tuple(torch.nn.utils.rnn.pad_sequence(side, True, PAD) for side in lines)


def trained(rng: random.Random) -> MarianMTModel:
    torch.manual_seed(0)
    shape = {"d_model": 96, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0}
    ids = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "forced_eos_token_id": None}
    model = MarianMTModel(MarianConfig(vocab_size=len(WORDS), scale_embedding=True, **shape, **heads, **ids))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        source, target = batch(rng, 64)
        fed = torch.cat([torch.full((len(target), 1), PAD), target[:, :-1]], dim=1)
        wrong = torch.rand(target.shape) < 0.3  # as drafts are
        fed = torch.where(wrong, torch.randint(2, len(WORDS), fed.shape), fed)
        labels = target.masked_fill(target == PAD, -100)
        model(source, source != PAD, decoder_input_ids=fed, labels=labels).loss.backward()
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    return model.eval()


def main() -> None:
    rng = random.Random(0)
    model, strategy = trained(rng), Jacobi(mode="hybrid", block_size=8, seed=0)
    augment_all()
    settings = {"num_beams": 1, "max_new_tokens": 48, "return_dict_in_generate": True}
    passes = tokens = right = 0
    for _ in range(5):
        source, target = batch(rng, 1)
        plain = model.generate(input_ids=source, **settings).sequences[0]
        ours = model.generate(input_ids=source, **settings, lookahead_strategy=strategy)
        text = " ".join(WORDS[token] for token in ours.sequences[0, 1:-1])
        print(f"-- {' '.join(WORDS[token] for token in source[0, :-1])}\n   {text}")
        print(f"   identical: {torch.equal(plain, ours.sequences[0])}")
        passes, tokens = passes + ours.stats.steps, tokens + len(plain) - 1
        right += plain[1:].tolist() == target[0].tolist()
    print(f"{tokens} tokens in {passes} passes: {tokens / passes:.2f} tokens per pass; right: {right} of 5")
    restore_all()


if __name__ == "__main__":
    main()
