"""Train the bundled model for consistency, so that Jacobi decoding of it writes several tokens a pass.

    python examples/train_tiny_consistency.py --minutes 38

A model trained for consistency takes every state of a Jacobi block to the text that the block converges to (CLLM, Kou
et al., arXiv 2403.00835; Jacobi Forcing, arXiv 2512.14681). The texts are the bundled model's own: what it writes,
greedy or sampled, behind pieces of the corpus of ``train_tiny_coder.py``. Each training step is also a Jacobi step of
many blocks of each text, packed behind it as branches of one tree::

    text      t0 t1 t2 t3 t4 t5 t6 ...        each sees what is left of it
    block        t1 d2 d3                     sees t0 and itself: learns what belongs behind t1, t2 and t3
    block                 t4 d5 d6            sees t0 to t3 and itself

What a block's places say is its next state, as in decoding: what agrees with the text is accepted, the block moves
there, and its new places begin as pad tokens. So the states are those of the model as it is at the time. Targets, for
blocks and texts, are the probabilities that the bundled model gives on the text as it is; those for texts keep what the
trained model writes close to what the bundled one does.
"""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import log_softmax
from train_tiny_coder import collect, optimizers
from transformers import DynamicCache

from lookahead import Jacobi, augment_all
from lookahead.bundled import load_bundled, load_model
from lookahead.models.names import CACHE

PROMPT = 64  # tokens of the corpus before each text
GENERATED = 32  # texts at a time, half of them sampled
TEMPERATURE = 0.8
DECAY = 0.8  # weight of a place of a block for each place that lies between it and the accepted ones
KEEP = 5.0  # weight of the texts' loss
PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts" / "code.jsonl"


@dataclass(slots=True)
class Text:
    """One text, what the bundled model says of it, and its blocks.

    ``teacher``: log-probabilities ``[place, vocab]`` of what follows each place; ``noise``: what was added to them when
    it was drawn, 0 where the text is greedy; ``at``, ``drafts``: each block's place, and its n - 1 tokens behind it.
    """

    tokens: Tensor
    teacher: Tensor
    noise: Tensor
    at: Tensor
    drafts: Tensor
    age: int = 0


def beginnings(tokenizer, files: list[str], rng: random.Random) -> Tensor:
    """Pieces for the model to continue: ``PROMPT`` tokens from a random line of a random file on."""
    found: list[list[int]] = []
    while len(found) < GENERATED:
        text = files[rng.randrange(len(files))]
        start = text.find("\n", rng.randrange(max(1, len(text) - 400))) + 1
        ids = tokenizer(text[start : start + 600], verbose=False)["input_ids"][:PROMPT]
        if len(ids) == PROMPT:
            found.append(ids)
    return torch.tensor(found)


@torch.no_grad()
def continued(model, prompts: Tensor, new: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The texts ``[row, place]`` and their noise ``[row, new, vocab]``; every second text is greedy."""
    shape = (len(prompts), new, model.config.vocab_size)
    noise = torch.empty(shape).exponential_(generator=generator).log_().mul_(-TEMPERATURE)  # Gumbel's
    noise[::2] = 0
    noise = noise.half()
    cache, fed, tokens = DynamicCache(), prompts, [prompts]
    for place in range(new):
        logits = model(input_ids=fed, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits[:, -1].float()
        fed = (logits + noise[:, place]).argmax(-1, keepdim=True)
        tokens.append(fed)
    return torch.cat(tokens, 1), noise


def texts_of(
    model, tokenizer, files: list[str], new: int, blocks: int, size: int, rng: random.Random
) -> Iterator[Text]:
    """The bundled model's texts without end, with blocks of guesses at random places."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    while True:
        rows = list(zip(*continued(model, beginnings(tokenizer, files, rng), new, generator), strict=True))
        rng.shuffle(rows)
        for tokens, drawn in rows:
            with torch.no_grad():
                teacher = log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0].float(), -1).half()
            noise = torch.zeros_like(teacher)
            noise[PROMPT - 1 : -1] = drawn
            at = torch.tensor([place(len(tokens), size, rng) for _ in range(blocks)])
            yield Text(tokens, teacher, noise, at, torch.full((blocks, size - 1), model.config.pad_token_id))


def place(length: int, size: int, rng: random.Random) -> int:
    """Where a block may stand."""
    return rng.randrange(PROMPT - 1, length - size)


def packed(texts: list[Text]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and positions ``[text, slot]``, and the additive mask, of texts with their blocks behind them."""
    tokens, at = torch.stack([text.tokens for text in texts]), torch.stack([text.at for text in texts])
    drafts = torch.stack([text.drafts for text in texts])
    length, blocks, size = tokens.shape[1], at.shape[1], drafts.shape[2] + 1
    ids = torch.cat([tokens, torch.cat([tokens.gather(1, at)[..., None], drafts], -1).flatten(1)], 1)
    places = (at[..., None] + torch.arange(size)).flatten(1)
    positions = torch.cat([torch.arange(length).expand(len(texts), -1), places], 1)
    seen = torch.zeros(len(texts), ids.shape[1], ids.shape[1], dtype=torch.bool)
    seen[:, :length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
    seen[:, length:, :length] = torch.arange(length) < at.repeat_interleave(size, 1)[..., None]
    inside = torch.ones(size, size, dtype=torch.bool).tril()
    seen[:, length:, length:] = torch.block_diag(*[inside] * blocks)
    return ids, positions, torch.zeros(seen.shape).masked_fill_(~seen, -1e9)[:, None]


def jacobi_step(model, texts: list[Text]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The losses of blocks and of texts, the blocks' next states ``[text, block, n]``, and their right drafts."""
    ids, positions, mask = packed(texts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    logs = log_softmax(logits.float(), -1)
    length, size = len(texts[0].tokens), texts[0].drafts.shape[1] + 1
    teacher = torch.stack([text.teacher for text in texts]).float()
    of_texts = (teacher.exp() * (teacher - logs[:, :length])).sum(-1).mean()
    rows = torch.arange(len(texts))[:, None, None]
    places = torch.stack([text.at for text in texts])[..., None] + torch.arange(size)
    mine = logs[:, length:].unflatten(1, (-1, size))
    states = (mine.detach() + torch.stack([text.noise for text in texts])[rows, places]).argmax(-1)
    right = torch.stack([text.tokens for text in texts])[rows, places + 1]
    drafts = torch.stack([text.drafts for text in texts])
    agreed = (drafts == right[..., :-1]).long().cumprod(-1).sum(-1)
    beyond = torch.arange(size) - agreed[..., None]  # places that see only the text are the texts' own loss
    weights = torch.where(beyond > 0, DECAY ** (beyond - 1).clamp(min=0), 0.0)
    losses = -(teacher[rows, places].exp() * mine).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1), of_texts, states, agreed


def advance(text: Text, states: Tensor, agreed: list[int], pad: int, rng: random.Random) -> None:
    """Move each block behind what was accepted of it. What is left of its state begins the next."""
    length, size = len(text.tokens), states.shape[1]
    for block, (state, right) in enumerate(zip(states, agreed, strict=True)):
        drafts = torch.full((size - 1,), pad)
        at = int(text.at[block]) + right + 1
        if at < length - size:
            drafts[: size - right - 1] = state[right + 1 :]
        else:
            at = place(length, size, rng)
        text.at[block], text.drafts[block] = at, drafts
    text.age += 1


def train(model, texts: Iterator[Text], out: Path, minutes: float, steps: int | None, batch: int, age: int, lr: float):
    """Train until the time or the steps are used up; prints the losses, and the mean of tokens accepted a block."""
    opts = optimizers(model, lr)
    rng, begin, saved, sums = random.Random(1), time.monotonic(), 0.0, torch.zeros(4)
    rows = [next(texts) for _ in range(batch)]
    for number, text in enumerate(rows):
        text.age = number * age // batch  # so that they are not all replaced at once
    model.train()
    number = 0
    while True:
        spent = (time.monotonic() - begin) / 60
        done = spent / minutes if steps is None else number / steps
        if done >= 1:
            break
        for group in (group for opt in opts for group in opt.param_groups):
            group["lr"] = lr * min(1.0, (done + 1e-3) / 0.05) * min(1.0, (1 - done) / 0.5 + 0.02)
        of_blocks, of_texts, states, agreed = jacobi_step(model, rows)
        (of_blocks + KEEP * of_texts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        for row, text in enumerate(rows):
            advance(text, states[row], agreed[row].tolist(), model.config.pad_token_id, rng)
            if text.age >= age:
                rows[row] = next(texts)
        number += 1
        sums += torch.tensor([of_blocks.item(), of_texts.item(), agreed.float().mean() + 1, 1.0])
        if number % 50 == 0:
            told = (sums[:3] / sums[3]).tolist()
            print(
                f"step {number}, {spent:.1f} min: loss of blocks {told[0]:.3f}, of texts {told[1]:.4f}, S {told[2]:.2f}"
            )
            sums.zero_()
        if spent - saved > 5:
            model.save_pretrained(out)
            saved = spent
    model.eval()


def settings(size: int) -> dict[str, Jacobi]:
    """The ways of decoding that are compared, by name."""
    common = {"block_size": size - 1, "initial_guess": "pad", "seed": 0}
    return {
        "block": Jacobi(mode="jacobi", **common),
        "two blocks": Jacobi(mode="jacobi", blocks=2, **common),
        "block, tails": Jacobi(mode="jacobi", tails=4, **common),
        "two blocks, tails": Jacobi(mode="jacobi", blocks=2, tails=4, **common),
        "sliding": Jacobi(**common),
        "sliding, tails": Jacobi(tails=4, **common),
    }


def tokens_per_pass(model, tokenizer, prompts: list[str], new: int, strategy: Jacobi, temperature: float) -> tuple:
    """S over all prompts, and nodes a pass."""
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    stats = []
    for seed, prompt in enumerate(prompts):
        torch.manual_seed(seed)
        inputs = tokenizer(prompt, return_tensors="pt")
        ours = {"lookahead_strategy": strategy, "return_dict_in_generate": True}
        stats.append(model.generate(**inputs, max_new_tokens=new, **ours, **sampled).stats)
    total = sum(stats[1:], stats[0])
    return total.emitted / total.steps, 1 + total.drafted / total.steps


@torch.no_grad()
def distance(model, teacher, tokenizer, prompts: list[str], new: int) -> tuple[float, float]:
    """How far the model's greedy texts are from the bundled model: nats a token, and the share of equal choices."""
    nats = same = count = 0.0
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        text = model.generate(**inputs, max_new_tokens=new, do_sample=False)
        begin = inputs["input_ids"].shape[1] - 1
        theirs, mine = (log_softmax(each(text).logits[0, begin:-1].float(), -1) for each in (teacher, model))
        nats += float((theirs.exp() * (theirs - mine)).sum())
        same += float((theirs.argmax(-1) == mine.argmax(-1)).sum())
        count += len(mine)
    return nats / count, same / count


def report(models: dict, tokenizer, size: int, prompts: list[str], new: int) -> None:
    """Print S of each way of decoding, for each model, greedy and at ``TEMPERATURE``."""
    for name, strategy in settings(size).items():
        told = []
        for label, model in models.items():
            for temperature in (0.0, TEMPERATURE):
                s, nodes = tokens_per_pass(model, tokenizer, prompts, new, strategy, temperature)
                told.append(f"{label} T {temperature} {s:.2f} ({nodes:.0f} nodes)")
        print(f"{name}: " + ", ".join(told), flush=True)
    nats, same = distance(models["trained"], models["untrained"], tokenizer, prompts, new)
    print(f"the trained model's texts: {nats:.3f} nats a token from the bundled model, {same:.0%} its own choices")


def main(
    out: Annotated[Path, typer.Option(help="Where the trained model goes.")] = Path("build/tiny-consistency"),
    minutes: Annotated[float, typer.Option(help="Training time.")] = 38.0,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps, whatever the time.")] = None,
    size: Annotated[int, typer.Option(help="n, tokens of a block, the known one included.")] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks of each text.")] = 12,
    new: Annotated[int, typer.Option(help="Tokens that the model writes of each text.")] = 192,
    batch: int = 4,
    age: Annotated[int, typer.Option(help="Steps that a text is used for.")] = 8,
    lr: float = 2e-3,
    corpus: Annotated[
        Path | None, typer.Option(help="Read the .py files of this folder in place of the corpus.")
    ] = None,
    site: Annotated[list[Path] | None, typer.Option(help="A further folder of installed packages.")] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to measure on.")] = 20,
    tokens: Annotated[int, typer.Option(help="Tokens to write behind each of them.")] = 96,
    seed: int = 0,
    evaluate: Annotated[bool, typer.Option(help="Only measure the model in --out.")] = False,
) -> None:
    """Train, save and measure."""
    augment_all()
    torch.manual_seed(seed)
    teacher, tokenizer = load_bundled()
    if not evaluate:
        model, _ = load_bundled()
        files = [file.read_text() for file in sorted(corpus.rglob("*.py"))] if corpus else []
        if corpus is None:
            splits, _ = collect(site or [], 16.0)
            files = [splits["train"][name] for name in sorted(splits["train"])]
        texts = texts_of(teacher, tokenizer, files, new, blocks, size, random.Random(seed))
        train(model, texts, out, minutes, steps, batch, age, lr)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    lines = PROMPTS.read_text().splitlines()
    held_out = [json.loads(line)["prompt"] for line in lines[:: max(1, len(lines) // prompts)][:prompts]]
    report({"untrained": teacher, "trained": load_model(out)[0]}, tokenizer, size, held_out, tokens)


if __name__ == "__main__":
    typer.run(main)
