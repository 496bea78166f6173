"""Streamers get plain decoding's tokens, early and in order; whether they break off or draw, the text stays."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from helpers.automatic import Oracle
from helpers.calls import Drawing
from helpers.devices import working_alone
from helpers.models import counting_model, prompts, run, same_as_plain, tiny_model
from helpers.streaming import Harmless, Puts
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, TextIteratorStreamer, TextStreamer

import lookahead
from jacobi import Successors
from lookahead import Jacobi, Lookahead

pytestmark = pytest.mark.usefixtures("augmented")


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


def test_the_first_token_is_put_before_anything_is_learnt() -> None:
    """A source may take its time with the prompt; no draft has to wait for it yet."""
    told: list[str] = []

    class Slow(Oracle):
        def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
            told.append("learnt")
            super().start(prompt, successors)

    strategy, streamer = Lookahead(sources=(Slow,)), Puts(lambda count: told.append("put"))
    counting_model().generate(**prompts(1), max_new_tokens=9, lookahead_strategy=strategy, streamer=streamer)
    assert told[:3] == ["put", "put", "learnt"], "the prompt, its token"
    assert len(streamer.puts) == 10


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
    if not patched:
        lookahead.restore_all()
    streamer = Puts()
    text = tiny_model("llama").generate(
        **prompts(2), custom_generate=Lookahead(), lookahead_streamer=streamer, max_new_tokens=15, do_sample=False
    )
    assert streamer.puts[0].tolist() == prompts(2)["input_ids"].tolist()
    assert torch.stack(streamer.puts[1:], dim=1).tolist() == text[:, 12:].tolist()
    assert streamer.ends == 1


STRATEGIES: dict[str, Any] = {
    "automatic": Lookahead(seed=0),
    "24 nodes": Lookahead(nodes=24, seed=0),
    "window": Lookahead(window_size=7, ngram_size=5, seed=0),
    "jacobi": Jacobi(seed=0),
}


class BrokenOffError(Exception):
    """What the streamers of these tests raise."""


def breaks_off(most: int, draws: Callable[[int], bool] = lambda count: False) -> Callable[[int], None]:
    """What a streamer does that draws after tokens for which ``draws`` says so, and breaks off after ``most`` puts."""

    def hear(count: int) -> None:
        if draws(count):
            torch.rand(3)
        if count > most:
            raise BrokenOffError

    return hear


def told(model: Any, batch: int, streamer: Puts, seed: int, **settings: Any) -> tuple[Any, ...]:
    """What a streamer was told, what was written, and what the generator gives then."""
    torch.manual_seed(seed)
    settings = {"do_sample": True, "max_new_tokens": 24, "return_dict_in_generate": True} | settings
    made = {name.removesuffix("_new"): value() if name.endswith("_new") else value for name, value in settings.items()}
    output = None
    with suppress(BrokenOffError):
        output = model.generate(**prompts(batch), streamer=streamer, **made)
    written = None if output is None else output.sequences.tolist()
    return ([put.tolist() for put in streamer.puts], written, torch.rand(2).tolist()), output


def same_told(model: Any, batch: int, new: Callable[[], Puts], seed: int, strategy: Any, **settings: Any) -> Any:
    """Assert that a streamer makes no difference to what lookahead writes and draws; return its output."""
    expected, _ = told(model, batch, new(), seed, **settings)
    found, output = told(model, batch, new(), seed, use_lookahead=True, lookahead_strategy=strategy, **settings)
    assert found == expected
    return output


@pytest.mark.parametrize("kind", [Puts, Harmless])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_streamer_breaks_off_behind_any_token(name: str, batch: int, kind: type[Puts]) -> None:
    model = counting_model(sharpness=6.0)
    for most in range(1, 24, 3 if batch == 1 else 7):
        same_told(model, batch, lambda most=most: kind(breaks_off(most)), most, STRATEGIES[name])


@pytest.mark.parametrize("kind", [Puts, Harmless])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_breaks_off_where_tokens_are_chosen_ahead(batch: int, kind: type[Puts]) -> None:
    model = counting_model(sharpness=6.0)
    same_told(model, batch, Puts, 0, Lookahead(nodes=12))  # the self-test runs on the host
    for most in range(1, 24, 5):
        with working_alone():
            same_told(model, batch, lambda most=most: kind(breaks_off(most)), most, Lookahead(nodes=12))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_streamer_that_draws_shifts_what_plain_decoding_would_draw(name: str, batch: int, alone: bool) -> None:
    """After every token, or after some, with an end token and scores, and breaking off."""
    model = counting_model(sharpness=6.0)
    same_told(model, batch, Puts, 0, STRATEGIES[name])
    calls: list[dict[str, Any]] = [{}, {"eos_token_id": 5}, {"output_scores": True, "top_k": 20}]
    for seed, settings in enumerate(calls):
        for draws, most in ((lambda count: True, 1 << 30), (lambda count: count % 5 == 2, 1 << 30 if seed else 11)):
            with working_alone() if alone else nullcontext():
                streamer = partial(Puts, breaks_off(most, draws))
                same_told(model, batch, streamer, seed, STRATEGIES[name], **settings)


class EndsByChance(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.rand(len(input_ids)) < 0.02


@pytest.mark.parametrize(
    "what", [{"logits_processor_new": lambda: [Drawing()]}, {"stopping_criteria_new": lambda: [EndsByChance()]}]
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
def test_a_streamer_beside_something_that_draws(batch: int, sample: bool, what: dict[str, Any]) -> None:
    model = counting_model(sharpness=6.0)
    for most in (3, 10, 1 << 30):
        settings = {"do_sample": sample} | what
        for kind in (Puts, Harmless):
            same_told(
                model, batch, lambda most=most, kind=kind: kind(breaks_off(most)), 3, Lookahead(nodes=12), **settings
            )
        same_told(model, batch, lambda most=most: Puts(breaks_off(most, lambda count: True)), 3, None, **settings)


def test_drafts_see_the_noise_until_a_streamer_draws() -> None:
    """Streamers that draw nothing cost a single sequence no pass."""
    model = counting_model(sharpness=5.0)
    steps = {}
    for kind in (Puts, Harmless):
        output = same_told(model, 1, kind, 5, Lookahead(nodes=24, seed=0), max_new_tokens=60)
        steps[kind] = output.stats.steps
    assert steps[Puts] == steps[Harmless] < 40
    assert output.stats.by_noise > 0
