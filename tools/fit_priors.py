#!/usr/bin/env python
"""Fit priors of the free sources: how often candidates of each kind are right on a model's own texts.

    python tools/fit_priors.py MODEL PROMPTS.json [--temperature 0.8] [--chat] [--new-tokens 96] [--nodes 24]

PROMPTS.json is a list of strings. Every text starts cold. What the sources propose at nodes that the text went through
is recorded with the token that was written there, and a conditional logit model is fitted to it (as
`lookahead.draft.acceptance` has it), held near today's priors where there are few trials. A third of the prompts is
kept aside; the mean log-likelihood of their nodes is printed before and after, and then the priors, source by source.
Texts and drafts depend on each other: after large changes, fit again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lookahead
from lookahead.draft import memory
from lookahead.draft.acceptance import SLOTS, Acceptance

Nodes = list[tuple[list[list[int]], int]]  # the slots of each candidate, and which candidate was right; -1: none


def record(model: Any, tokenizer: Any, prompts: list[str], args: argparse.Namespace) -> tuple[list[Nodes], Acceptance]:
    """The nodes of each prompt's text, and estimates as they are before anything is learnt."""
    found: list[Nodes] = []
    first: list[Acceptance] = []
    count = Acceptance.count
    init = Acceptance.__init__

    def counted(self: Acceptance, offered: Any, truth: Any) -> None:
        right = next((place for place, share in enumerate(truth) if share == 1.0), -1)
        found[-1].append(([list(slots) for slots in offered.values()], right))
        count(self, offered, truth)

    def made(self: Acceptance, sources: Any, trust: float = 1.0) -> None:
        init(self, sources, trust)
        first.append(self.copy(1.0))
        first[-1].priors = [(source.name, source.priors) for source in sources]  # type: ignore[attr-defined]

    Acceptance.count, Acceptance.__init__ = counted, made  # type: ignore[method-assign]
    sampled = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {}
    for seed, prompt in enumerate(prompts):
        if args.chat:
            message = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not args.chat).to(model.device)
        found.append([])
        memory.exchange(model)
        torch.manual_seed(seed)
        strategy = lookahead.Lookahead(nodes=args.nodes, remember=False)
        output = model.generate(
            **inputs,
            max_new_tokens=args.new_tokens,
            **({"do_sample": False} | sampled),
            lookahead_strategy=strategy,
            return_dict_in_generate=True,
        )
        print(f"{seed}: {output.stats.mean_acceptance_length:.2f} tokens a pass", flush=True)
    Acceptance.count, Acceptance.__init__ = count, init  # type: ignore[method-assign]
    return found, first[0]


def tensors(nodes: Nodes) -> tuple[torch.Tensor, ...]:
    """By slot that is voted with: its candidate, and the slot; by candidate: its node, and whether it was right."""
    candidates = [
        (node, slots, place == right) for node, (all_, right) in enumerate(nodes) for place, slots in enumerate(all_)
    ]
    votes = [(number, slot) for number, (_, slots, _) in enumerate(candidates) for slot in slots]
    at, slot = torch.tensor(votes).T
    return (
        at,
        slot,
        torch.tensor([node for node, *_ in candidates]),
        torch.tensor([float(each[2]) for each in candidates]),
    )


def likelihood(weights: torch.Tensor, data: tuple[torch.Tensor, ...], count: int) -> torch.Tensor:
    """The sum of the log-likelihoods of so many nodes."""
    at, slot, node, right = data
    strength = torch.zeros(len(node)).index_add(0, at, weights[slot])
    whole = 1.0 + torch.zeros(count).index_add(0, node, strength.clamp(max=30.0).exp())
    return (strength * right).sum() - whole.log().sum()


def fitted(start: torch.Tensor, nodes: Nodes, hold: float = 1.0) -> torch.Tensor:
    """Weights of the highest likelihood, held near where they start."""
    weights, data = start.clone().requires_grad_(True), tensors(nodes)
    optimizer = torch.optim.Adam([weights], 0.05)
    for _ in range(400):
        optimizer.zero_grad()
        loss = 0.5 * hold * ((weights - start) ** 2).sum() - likelihood(weights, data, len(nodes))
        torch.autograd.backward(loss)
        optimizer.step()
    return weights.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=24)
    args = parser.parse_args()
    lookahead.augment_all()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    texts, known = record(model, AutoTokenizer.from_pretrained(args.model), json.loads(args.prompts.read_text()), args)
    kept = [node for text in texts[::3] for node in text if node[0]]
    used = [node for number, text in enumerate(texts) if number % 3 for node in text if node[0]]
    start = torch.tensor(known.weights)
    for name, weights in (("before", start), ("after", end := fitted(start, used))):
        print(
            f"{name}: {likelihood(weights, tensors(kept), len(kept)) / len(kept):.4f} a node of {len(kept)} kept aside"
        )
    for (name, priors), offset in zip(known.priors, known.offsets, strict=True):  # type: ignore[attr-defined]
        fit = [float(torch.sigmoid(end[offset + kind * SLOTS])) for kind in range(len(priors))]
        print(name, [round(prior, 3) for prior in fit])


if __name__ == "__main__":
    main()
