"""From data to heads on disk: what is written, what is refused, the evaluation, own answers, the command."""

import dataclasses
import json
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run
from helpers.models import counting_model, fresh_model
from helpers.refusals import refuses
from helpers.training import drawn, small_model, texts

from jacobi import LookaheadError
from lookahead import bundled
from lookahead.heads.medusa.calibration import score
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.training import MedusaRecipe
from lookahead.medusa import Medusa, MedusaHeads, output_layer
from lookahead.training.data import IGNORE, Example, collate
from lookahead.training.distillation import own_answers
from lookahead.training.evaluation import Evaluation, compare, continued, spread
from lookahead.training.items import Item

TEXTS = [
    "def add(a, b):\n    return a + b\n" * 3,
    "import os\n\nprint(os.name)\n" * 3,
    "x = [1, 2, 3]\ny = x * 2\n" * 3,
]
ITEMS = [Item(f"item {number}", text) for number, text in enumerate(TEXTS * 3)]
SETTINGS = MedusaSettings(num_heads=2, block_size=32, epochs=1.0, min_steps=0)
TWO = dataclasses.replace(SETTINGS, method="medusa-2", schedule="sine", lora_rank=2)


@pytest.fixture
def loaded(folder: Path) -> tuple[Any, Any]:
    return bundled.load_model(folder, dtype=torch.float32)


def fitted(loaded: tuple[Any, Any], output: Path, settings: MedusaSettings = SETTINGS, **more: Any) -> Evaluation:
    given: dict[str, Any] = {"new_tokens": 6, "evaluation_prompts": 1}
    evaluation = MedusaRecipe.fit(*loaded, ITEMS[1:], ITEMS[:1], output, settings, **given | more)
    assert evaluation is not None  # one process
    return evaluation


# --- the evaluation ---------------------------------------------------------------------------------------------


def test_scores_are_counted_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookahead.training.data.BATCH", 3)
    model = fresh_model("llama")
    heads = drawn(model)
    examples = [*texts(3), Example.of([3, 4, 5, 6, 7])]
    told: list[float] = []
    parts, count = score(model, heads, examples, report=told.append)
    losses, ranks = [], []
    head_ranks: list[list[int]] = [[], []]
    for example in examples:
        given = collate([example], 0)
        labels = given["labels"][0]
        logits = model(input_ids=given["input_ids"]).logits[0]
        later = heads(model.model(input_ids=given["input_ids"]).last_hidden_state[0], output_layer(model))
        for place in range(len(labels)):
            for ahead, scores, found in [(1, logits, ranks), *((h + 2, later[h], head_ranks[h]) for h in (0, 1))]:
                if place + ahead < len(labels) and labels[place + ahead] != IGNORE:
                    found.append(int((scores[place] > scores[place, labels[place + ahead]]).sum()))
                    if ahead == 1:
                        losses.append(-scores[place].log_softmax(-1)[labels[place + 1]].item())
    assert count == len(ranks)
    assert parts.pop("loss_model") == pytest.approx(sum(losses) / len(losses))
    expected = {}
    for name, found in (("model", ranks), ("0", head_ranks[0]), ("1", head_ranks[1])):
        for part, best in (("right", 1), ("top5", 5)):
            expected[f"{part}_{name}"] = sum(rank < best for rank in found) / len(found)
    assert parts == pytest.approx(expected)
    assert told[-1] == 1.0


def test_heads_that_know_the_text_are_always_right() -> None:
    """On a text that counts, heads whose output layers are shifted by one count too."""
    model = counting_model(period=5)
    heads = MedusaHeads.for_model(model, 2, 0, own_output=True)
    follow = {token: token % 5 + 1 for token in range(1, 6)}
    with torch.no_grad():
        weight = output_layer(model).weight.clone()
        for layer in heads.outputs.children():
            for token, after in follow.items():
                layer.weight[after] = weight[token]
            weight = layer.weight.clone()
    counted = [Example.of([(start + place) % 5 + 1 for place in range(20)]) for start in range(3)]
    parts, _ = score(model, heads, counted)
    assert {name: share for name, share in parts.items() if name != "loss_model"} == {
        f"{part}_{name}": 1.0 for part in ("right", "top5") for name in ("model", "0", "1")
    }
    rates = compare(model, MedusaRecipe(heads, SETTINGS), [[1, 2, 3]], 13)["greedy"]
    assert rates["heads"] == pytest.approx(13 / 5), "one for the prompt, and then three a pass"
    assert rates["heads and free sources"] >= rates["free sources"]


def test_held_out_data_without_a_token_for_a_head_is_refused() -> None:
    model = small_model()
    refuses("too short: there is no token for head 1 to predict", score, model, drawn(model), [Example.of([1, 2, 3])])
    refuses("no token for the model to predict", score, model, None, [Example.of([1, 2, 3], [False] * 3)])


def test_prompts_are_cut_from_held_out_texts() -> None:
    answer = Example.of([1, 2, 3, 4], [False, False, True, True])
    assert continued([answer, Example.of([5, 6, 7, 8, 9]), Example.of([5])], 9) == [[1, 2], [5, 6]]
    assert continued([Example.of(list(range(200)))], 1) == [list(range(64))]
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread("ab", 4) == ["a", "b"]


# --- what is written --------------------------------------------------------------------------------------------


def test_heads_card_and_evaluation_are_written(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    told: set[str] = set()
    evaluation = fitted(loaded, tmp_path / "out", name="tiny", report=lambda stage, done, logs: told.add(stage))
    assert told == {"encoding", "heads", "evaluating"}
    document = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert document == json.loads(json.dumps(evaluation.to_dict()))
    names = [f"{part}_{name}" for name in ("model", "0", "1") for part in ("right", "top5")]
    assert list(document["parts"]) == ["loss_model", *names]
    assert list(document["tokens_per_pass"]["greedy"]) == ["free sources", "heads", "heads and free sources"]
    assert document["training"]["settings"]["num_heads"] == 2
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# Medusa heads" in card and f"| right_1 | {evaluation.parts['right_1']:.3f} |" in card
    heads = MedusaHeads.from_pretrained(tmp_path / "out", model=loaded[0])
    assert (heads.num_heads, heads.base_model) == (2, "tiny")
    stored = MedusaHeads.from_pretrained(tmp_path / "out")
    assert {weight.dtype for weight in stored.parameters()} == {torch.float16}
    assert not (tmp_path / "out" / "adapter").exists() and not (tmp_path / "out" / "model").exists()
    (held,) = (item.text for item in ITEMS[:1])
    given = loaded[1](held[:20], return_tensors="pt")
    plain = loaded[0].generate(**given, max_new_tokens=9, do_sample=False)
    ours = loaded[0].generate(**given, max_new_tokens=9, do_sample=False, custom_generate=Medusa(tmp_path / "out"))
    assert plain.tolist() == ours.tolist()


@pytest.mark.slow
def test_an_adapter_is_saved_beside_the_heads(loaded: tuple[Any, Any], folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    evaluation = fitted(loaded, tmp_path, TWO)
    assert evaluation.parts["loss_before"] != evaluation.parts["loss_model"]
    assert f"| loss_before | {evaluation.parts['loss_before']:.3f} |" in (tmp_path / "README.md").read_text()
    model, tokenizer = bundled.load_model(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what has a new name there
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    given = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(adapted(given).logits, loaded[0](given).logits)
        with adapted.disable_adapter():
            assert not torch.equal(adapted(given).logits, loaded[0](given).logits)


def test_a_trained_model_is_saved_beside_the_heads(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    fitted(loaded, tmp_path, dataclasses.replace(TWO, backbone="full"))
    model, tokenizer = bundled.load_model(tmp_path / "model", dtype=torch.float32)
    given = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(given).logits, loaded[0](given).logits)
    MedusaHeads.from_pretrained(tmp_path).check(model)


# --- the folder -------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folders_with_other_things_are_refused(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refuses(r"holds something else. Choose a new one, or overwrite with --force", fitted, loaded, tmp_path)
    refuses(r"notes.txt is a file: expected a folder", fitted, loaded, tmp_path / "notes.txt")
    refuses("There is no training to resume in", fitted, loaded, tmp_path, resume=True)
    refuses("resume and force cannot be combined", fitted, loaded, tmp_path, resume=True, force=True)
    assert files(tmp_path) == {"notes.txt": b"mine"}
    fitted(loaded, tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    refuses("holds a training; continue it with --resume", fitted, loaded, tmp_path)


def test_force_drops_what_an_earlier_training_left(loaded: tuple[Any, Any], folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    fitted(loaded, tmp_path, TWO)
    assert (tmp_path / "adapter").exists()
    fitted(bundled.load_model(folder, dtype=torch.float32), tmp_path, SETTINGS, force=True)
    assert not (tmp_path / "adapter").exists()
    assert not (tmp_path / "checkpoints" / "both").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, "cannot be resumed with batch_size=3: it was begun with 2"),
        ({"block_size": 30}, "cannot be resumed with block_size=30: it was begun with 32"),
    ],
)
def test_another_training_is_not_resumed(
    loaded: tuple[Any, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    fitted(loaded, tmp_path)
    before = files(tmp_path)
    refuses(message, fitted, loaded, tmp_path, dataclasses.replace(SETTINGS, **changes), resume=True)
    with pytest.raises(LookaheadError, match=r"cannot be resumed with data='"):
        MedusaRecipe.fit(*loaded, ITEMS[2:], ITEMS[:1], tmp_path, SETTINGS, resume=True)
    assert files(tmp_path) == before
    evaluation = fitted(loaded, tmp_path, dataclasses.replace(SETTINGS, max_minutes=9.0), resume=True)
    assert evaluation.training["steps"] == json.loads(before["evaluation.json"])["training"]["steps"]
    assert files(tmp_path)["medusa_lm_head.safetensors"] == before["medusa_lm_head.safetensors"]


def test_refusals_leave_no_folder(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    output = tmp_path / "out"
    for items, held_out in (([Item("f", "a")], ITEMS[:1]), (ITEMS, [Item("f", "a")])):
        refuses("The data is too short", MedusaRecipe.fit, *loaded, items, held_out, output, SETTINGS)
    refuses("block_size=513", fitted, loaded, output, dataclasses.replace(SETTINGS, block_size=513))
    loaded[0].lm_head.register_forward_hook(lambda module, inputs, output: output.detach())
    refuses("passes no gradient on to the heads before it", fitted, loaded, output)
    assert not output.exists()


# --- own answers ------------------------------------------------------------------------------------------------


def answering(tokens: int, **changes: Any) -> MedusaSettings:
    return dataclasses.replace(SETTINGS, answer_tokens=tokens, **changes)


def test_own_answers_are_the_models_text(tmp_path: Path) -> None:
    model = counting_model(period=5)
    model.generation_config.eos_token_id = [5, 40]
    told: list[float] = []
    examples = own_answers(model, [[1, 2], [9, 9, 1], [3]], tmp_path, answering(3), told.append)
    assert [example.ids.tolist() for example in examples] == [[1, 2, 3, 4, 5], [9, 9, 1, 2, 3, 4], [3, 4, 5]]
    assert [example.loss.tolist().index(True) for example in examples] == [2, 3, 1]
    assert told == [1.0]


def test_sampled_answers_have_a_seed(tmp_path: Path) -> None:
    model = fresh_model("llama")
    starts = [[1, 2], [3, 4, 5]]
    state = torch.get_rng_state()
    found = [
        own_answers(model, starts, tmp_path / str(place), answering(8, temperature=2.0, seed=seed))
        for place, seed in enumerate((1, 1, 2))
    ]
    one, same, other = ([example.ids.tolist() for example in examples] for examples in found)
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), state)


def test_answers_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama")
    starts = [[token, 2, 3] for token in range(1, 12)]
    whole = own_answers(model, starts, tmp_path / "whole", answering(4))
    (file,) = (tmp_path / "whole").iterdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / file.name).write_bytes(file.read_bytes()[:-9])
    asked: list[int] = []
    generate = type(model).generate

    def counted(self: Any, input_ids: Any, **settings: Any) -> Any:
        asked.append(len(input_ids))
        return generate(self, input_ids=input_ids, **settings)

    monkeypatch.setattr(type(model), "generate", counted)
    again = own_answers(model, starts, tmp_path / "cut", answering(4))
    assert [example.ids.tolist() for example in again] == [example.ids.tolist() for example in whole]
    assert asked == [1], "only the one that was cut off"


def test_self_distillation_from_prompts_to_heads(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """Prompts without completions do; a second run over the same folder asks the model nothing."""
    settings = dataclasses.replace(SETTINGS, distil=True, answer_tokens=8)
    asked = [Item(f"item {number}", prompt=text[: 9 + number]) for number, text in enumerate(TEXTS)]
    told: list[str] = []
    given: dict[str, Any] = {"evaluation_prompts": 0, "report": lambda stage, done, logs: told.append(stage)}
    evaluation = MedusaRecipe.fit(*loaded, asked[1:], asked[:1], tmp_path, settings, **given)
    assert evaluation.parts["right_model"] == 1.0, "the labels are the model's own"
    assert evaluation.tokens == 8 and not evaluation.tokens_per_pass
    assert told.count("answering") == 2
    told.clear()
    MedusaRecipe.fit(*loaded, asked[1:], asked[:1], tmp_path, settings, resume=True, **given)
    assert "answering" not in told


@pytest.mark.slow
def test_self_distillation_of_the_model(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    evaluation = fitted(loaded, tmp_path, dataclasses.replace(TWO, distil=True, answer_tokens=8, epochs=4.0))
    before, after = (evaluation.parts[f"loss_{name}"] for name in ("before", "model"))
    assert after == pytest.approx(before, rel=0.1), "it is held to what it was"


def test_answers_that_are_too_short_are_refused(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = bundled.load_model(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = list(range(258))
    settings = dataclasses.replace(SETTINGS, distil=True)
    with pytest.raises(LookaheadError, match="own answers are too short: expected at least one of 4 tokens"):
        MedusaRecipe.fit(
            model, tokenizer, [Item("f", prompt="ab")], [Item("g", prompt="cd")], tmp_path / "out", settings
        )


# --- the command ------------------------------------------------------------------------------------------------

SMALL = ("--heads", 2, "--block-size", 32, "--epochs", 1, "--min-steps", 0)


@pytest.fixture
def data(tmp_path: Path, brief_evaluation: None) -> Path:
    (tmp_path / "data").mkdir()
    for number, item in enumerate(ITEMS[:3]):
        (tmp_path / "data" / f"{number}.py").write_text(item.text)
    return tmp_path / "data"


def test_train_medusa_trains_and_tells(folder: Path, data: Path, tmp_path: Path) -> None:
    given = ("train", "--kind", "medusa", "--model", folder, "--data", data, "-o", tmp_path / "out", *SMALL)
    ran = run(*given)
    assert ran.status == 0 and ran.err.startswith("Encoding: 0%")  # progress alone
    for told in ("loss_model ", "right_model 0.", "right_0 0.", "top5_1 0.", "heads and free sources "):
        assert told in ran.words
    assert "Saved in" in ran.out
    assert MedusaHeads.from_pretrained(tmp_path / "out").num_heads == 2
    document = json.loads(run(*given, "--resume", "--json").out)
    assert document["output"] == str(tmp_path / "out")
    assert document["training"]["settings"]["max_minutes"] == 15.0


def test_train_medusa_says_what_medusa_2_did(folder: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    options = ("--method", "medusa-2", "--schedule", "sine", "--lora-rank", 2, "--max-minutes", 0)
    ran = run("train", "--kind", "medusa", "--model", folder, "--data", data, "-o", tmp_path / "out", *SMALL, *options)
    assert ran.status == 0
    assert "loss_before " in ran.words


def test_the_bundled_models_data_is_the_standard_library(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(data)})
    (data / "site-packages").mkdir()
    (data / "site-packages" / "other.py").write_text("other = 1\n" * 9)
    ran = run("train", "--kind", "medusa", "-o", tmp_path / "out", *SMALL, "--json", "--max-items", 3)
    training = json.loads(ran.out)["training"]
    assert training["items"] + training["held_out_items"] == 3


def test_other_data_can_be_evaluated_on(folder: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(TEXTS[0])
    options = ("--eval-data", tmp_path / "other.txt", "--json")
    ran = run("train", "--kind", "medusa", "--model", folder, "--data", data, "-o", tmp_path / "out", *SMALL, *options)
    training = json.loads(ran.out)["training"]
    assert (training["items"], training["held_out_items"]) == (3, 1)
