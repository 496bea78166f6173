"""The same text in fewer forward passes: plain generate, then generate with lookahead."""

from time import perf_counter

import torch

from lookahead import Lookahead, augment_all, load_bundled, restore_all

PROMPT = 'class Point:\n    """A point in the plane."""\n\n    def __init__(self, x, y):'


def main() -> None:
    model, tokenizer = load_bundled()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    settings = {"max_new_tokens": 96, "do_sample": False, "return_dict_in_generate": True}

    augment_all()  # from now on every model's generate knows use_lookahead
    model.generate(**inputs, use_lookahead=True, max_new_tokens=16)  # warm-up, and the model's one-off self-test

    start = perf_counter()
    plain = model.generate(**inputs, **settings)
    middle = perf_counter()
    ours = model.generate(**inputs, **settings, use_lookahead=True)
    end = perf_counter()

    passes = plain.sequences.shape[1] - inputs["input_ids"].shape[1]  # plain decoding: one token a pass
    print(tokenizer.decode(ours.sequences[0], skip_special_tokens=True))
    print("-" * 60)
    print(f"identical: {torch.equal(plain.sequences, ours.sequences)}")
    print(f"plain:     {passes} passes, {1e3 * (middle - start):.0f} ms")
    print(f"lookahead: {ours.stats.steps} passes, {1e3 * (end - middle):.0f} ms")
    print(f"tokens per pass: {ours.stats.mean_acceptance_length:.2f}")

    # Other settings for one call: W columns, n-grams of N tokens, at most G guesses.
    small = Lookahead(window_size=3, ngram_size=3, verification_set_size=3)
    ours = model.generate(**inputs, **settings, lookahead_strategy=small)
    print(f"tokens per pass with W=3, N=3, G=3: {ours.stats.mean_acceptance_length:.2f}")
    restore_all()


if __name__ == "__main__":
    main()
