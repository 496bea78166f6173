"""Sampling is exact too: the same seed gives plain generate's text, whatever the temperature.

The hotter the sampling, the less of a draft is accepted, so the fewer tokens a pass brings.
"""

import torch

from lookahead import Lookahead, load_bundled

PROMPT = 'def read_json(path):\n    """Read a JSON file and return its content."""'


def main() -> None:
    model, tokenizer = load_bundled()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    strategy = Lookahead(seed=0)  # seeds the drafts, so that the number of passes is repeatable; never the text

    for temperature in (0.2, 0.6, 1.0):
        settings = {"max_new_tokens": 64, "do_sample": True, "temperature": temperature, "top_p": 0.95}
        torch.manual_seed(0)
        plain = model.generate(**inputs, **settings)
        torch.manual_seed(0)
        # A strategy is also a custom_generate function: no augment_all() is needed.
        ours = model.generate(**inputs, **settings, custom_generate=strategy, return_dict_in_generate=True)
        same = torch.equal(plain, ours.sequences)
        print(f"-- temperature {temperature}: same text as plain sampling: {same}, ", end="")
        print(f"{ours.stats.mean_acceptance_length:.2f} tokens per pass")
        print(tokenizer.decode(ours.sequences[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
