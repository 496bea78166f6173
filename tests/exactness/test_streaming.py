"""Streamers get the tokens of plain decoding, early and in order."""

import threading
from collections.abc import Sequence

import pytest
import torch
from helpers.automatic import Oracle
from helpers.models import counting_model, prompts, run, same_as_plain, tiny_model
from helpers.streaming import Puts
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer

import lookahead
from jacobi import Successors
from lookahead import Lookahead

augmented = pytest.mark.usefixtures("augmented")


@augmented
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("eos", [None, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_streamer(batch: int, eos: int | None, sample: bool) -> None:
    """The prompt, then one 1-D put for each token of the batch, in order, then one end; as plain generate does it."""
    for model in (counting_model(), tiny_model("llama")):
        kept: list[Puts] = []

        def new(kept: list[Puts] = kept) -> Puts:
            kept.append(Puts())
            return kept[-1]

        output = same_as_plain(
            model, prompts(batch), max_new_tokens=25, streamer_new=new, eos_token_id=eos, do_sample=sample
        )
        plain, ours = kept
        assert ours.ends == plain.ends == 1
        assert [put.shape for put in ours.puts] == [put.shape for put in plain.puts]
        assert [put.tolist() for put in ours.puts] == [put.tolist() for put in plain.puts]
        assert all(put.shape == (batch,) and put.dtype is torch.int64 for put in ours.puts[1:])
        assert torch.stack(ours.puts[1:], dim=1).tolist() == output.sequences[:, 12:].tolist()


@augmented
def test_streaming_is_not_late() -> None:
    """Tokens are put after the pass that decided them, not at the end."""
    model, streamer = counting_model(), Puts()
    put_before_pass: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: put_before_pass.append(len(streamer.puts)))
    settings = {
        "lookahead_strategy": Lookahead(window_size=7, seed=0, stats="detailed"),
        "return_dict_in_generate": True,
    }
    output = model.generate(**prompts(1), max_new_tokens=40, do_sample=False, streamer=streamer, **settings)
    handle.remove()
    written = [sum(step["tokens"]) for step in output.stats.passes]
    expected = [1 + sum(written[:index]) for index in range(len(written))]  # the prompt is a put as well
    assert put_before_pass[-len(expected) :] == expected


@augmented
def test_the_first_token_is_put_before_anything_is_learnt() -> None:
    """A source may take its time with the prompt; no draft has to wait for it yet."""
    told: list[str] = []

    class Slow(Oracle):
        def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
            told.append("learnt")
            super().start(prompt, successors)

    class Streamer(Puts):
        def put(self, value: torch.Tensor) -> None:
            told.append("put")
            super().put(value)

    strategy, streamer = Lookahead(sources=(Slow,)), Streamer()
    counting_model().generate(**prompts(1), max_new_tokens=9, lookahead_strategy=strategy, streamer=streamer)
    assert told[:3] == ["put", "put", "learnt"], "the prompt, its token"
    assert len(streamer.puts) == 10


@augmented
def test_text_streamers(tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers' own streamers, one of them read from another thread."""
    model, inputs = counting_model(), prompts(1)
    text = tokenizer.decode(run(model, inputs, max_new_tokens=20)[0][0, 12:])
    model.generate(**inputs, max_new_tokens=20, use_lookahead=True, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == text
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60.0)
    settings = {"max_new_tokens": 20, "use_lookahead": True, "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=inputs | settings)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).strip() == text
    assert len(pieces) > 10


@pytest.mark.parametrize("patched", [False, True])
def test_custom_generate_streams(patched: bool) -> None:
    """transformers keeps the streamer to itself on this path, so ours has another name."""
    if patched:
        lookahead.augment_all()
    streamer = Puts()
    text = tiny_model("llama").generate(
        **prompts(2), custom_generate=Lookahead(), lookahead_streamer=streamer, max_new_tokens=15, do_sample=False
    )
    assert streamer.puts[0].tolist() == prompts(2)["input_ids"].tolist()
    assert torch.stack(streamer.puts[1:], dim=1).tolist() == text[:, 12:].tolist()
    assert streamer.ends == 1
