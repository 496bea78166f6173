"""Text as it is written, two ways: printed by a TextStreamer, and read from a TextIteratorStreamer in a thread.

With lookahead a text comes in bursts, because a pass often brings several tokens at once.
"""

from threading import Thread
from time import perf_counter

from transformers import TextIteratorStreamer, TextStreamer

from lookahead import augment_all, load_bundled, restore_all

PROMPT = 'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):'


def main() -> None:
    model, tokenizer = load_bundled()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    augment_all()

    print("-- printed as it comes")
    model.generate(**inputs, use_lookahead=True, max_new_tokens=64, streamer=TextStreamer(tokenizer))

    print("-- read from a thread")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {**inputs, "use_lookahead": True, "max_new_tokens": 64, "streamer": streamer}
    thread = Thread(target=model.generate, kwargs=arguments)
    start = perf_counter()
    thread.start()
    for piece in streamer:
        if piece:
            print(f"{1e3 * (perf_counter() - start):7.1f} ms  {piece!r}")
    thread.join()
    restore_all()


if __name__ == "__main__":
    main()
