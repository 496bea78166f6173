"""A batch of prompts of different lengths: sequences advance at speeds of their own, texts are plain generate's."""

import torch

from lookahead import augment_all, load_bundled, restore_all

PROMPTS = [
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):',
    'def read_json(path):\n    """Read a JSON file and return its content."""',
    "import os\nimport sys",
]


def main() -> None:
    model, tokenizer = load_bundled()
    tokenizer.padding_side = "left"  # new tokens follow the last column
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    settings = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}

    augment_all()
    plain = model.generate(**inputs, **settings)
    ours = model.generate(**inputs, **settings, use_lookahead=True)
    restore_all()

    for number, text in enumerate(tokenizer.batch_decode(ours.sequences, skip_special_tokens=True)):
        print(f"-- sequence {number}: identical: {torch.equal(plain.sequences[number], ours.sequences[number])}")
        print(text)
    stats = ours.stats
    print("-" * 60)
    print(f"{stats.emitted} tokens in {stats.steps} passes of the whole batch")
    print(f"tokens per pass and sequence: {stats.mean_acceptance_length:.2f}")
    for tokens, times in sorted(stats.histogram.items()):
        print(f"{tokens:2d} at once: {times:3d} {'#' * times}")


if __name__ == "__main__":
    main()
