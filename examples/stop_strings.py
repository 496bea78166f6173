"""Stopping rules are checked token by token, inside an accepted block too: nothing is written past a stop string."""

import torch

from lookahead import augment_all, load_bundled, restore_all

PROMPT = 'class Point:\n    """A point in the plane."""\n\n    def __init__(self, x, y):'


def main() -> None:
    model, tokenizer = load_bundled()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    settings = {"max_new_tokens": 64, "do_sample": False}

    augment_all()
    full = model.generate(**inputs, **settings, use_lookahead=True)[0, start:]
    written = tokenizer.decode(full)
    print(f"-- without a stop string: {len(full)} tokens\n{written}")

    # Stop at the line break that ends the first line, or the second, or at a word from the middle of the text.
    words = written.split()
    for stop in ("\n", "\n\n", words[len(words) // 2]):
        rule = {"stop_strings": [stop], "tokenizer": tokenizer}
        plain = model.generate(**inputs, **settings, **rule)[0, start:]
        ours = model.generate(**inputs, **settings, **rule, use_lookahead=True)[0, start:]
        print(f"-- stop at {stop!r}: {len(ours)} tokens, identical: {torch.equal(plain, ours)}")
        print(tokenizer.decode(ours))
    restore_all()


if __name__ == "__main__":
    main()
