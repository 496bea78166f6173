"""A source of drafts of your own, in 30 lines: a file of phrases that your texts tend to contain.

    python examples/own_source.py

The text stays the model's own, whatever a source proposes; a good source only makes it arrive sooner.
"""

import torch

import lookahead
from lookahead import Lookahead
from lookahead.sources import SuffixAutomaton

PHRASES = """
    if not isinstance(value, str):
        raise TypeError("expected a string")
    def __init__(self, name, value=None):
        self.name = name
        self.value = value
    for index, item in enumerate(items):
"""


class Phrases:
    """Proposes what follows, in the phrases, the longest context found there. A kind is the length of that context."""

    name = "phrases"
    priors = (0.2, 0.4, 0.6, 0.8)  # for contexts of 1, 2, 3 and more tokens; what is true is learnt while decoding

    def __init__(self, tokens):
        self.automaton = SuffixAutomaton()
        for token in tokens:
            self.automaton.append(token)
        self.at = (0, 0)

    def start(self, prompt, successors):
        for token in prompt:
            self.at = self.step(self.at, token)

    def root(self):
        return self.at

    def step(self, state, token):
        return self.automaton.step(*state, token)

    def propose(self, state):
        kind = min(state[1], 4) - 1
        return [(token, kind) for token in list(self.automaton.continuations(state[0]))[:3]] if kind >= 0 else []

    def learn(self, tree, path, successors):
        for token in path.tokens:
            self.at = self.step(self.at, token)


def main() -> None:
    """Decode with the built-in sources alone, and with the phrases in front of them."""
    lookahead.augment_all()
    model, tokenizer = lookahead.load_bundled()
    phrases = tokenizer(PHRASES)["input_ids"]
    inputs = tokenizer('class Field:\n    """A named value."""', return_tensors="pt", return_token_type_ids=False)
    settings = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}
    texts = []
    for sources in (("recycling", "suffix"), (lambda row: Phrases(phrases), "recycling", "suffix")):
        strategy = Lookahead(sources=sources, remember=False)
        output = model.generate(**inputs, lookahead_strategy=strategy, **settings)
        texts.append(output.sequences)
        print(output.stats.explain())
    print(tokenizer.decode(texts[0][0], skip_special_tokens=True))
    print("The same text both times:", torch.equal(*texts))


if __name__ == "__main__":
    main()
