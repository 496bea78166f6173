"""Train the bundled model: a small Llama that writes Python, from source that is on this machine.

    pip install --no-deps --target build/corpus -r examples/tiny_coder_corpus.txt
    python examples/train_tiny_coder.py --site build/corpus --minutes 95

The corpus is the running interpreter's standard library and every installed package whose metadata
declares a permissive licence (``--site DIR`` adds further package directories). A file is held out when the
SHA-256 of its bytes says so, so two copies of one file always land on the same side. Stopping and starting
again resumes; ``--evaluate`` prints the held-out bits per byte of an exported model.
"""

import hashlib
import importlib.metadata
import json
import math
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track
from tokenizers import Regex as TokenizerRegex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT_ONE_IN = 50
END = "<|endoftext|>"
PAD = "<|pad|>"
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|CNRI-Python)\b", re.IGNORECASE)
COPYLEFT = re.compile(r"GPL|MPL|Mozilla|EPL|Eclipse|CDDL", re.IGNORECASE)
# One piece per word, number, run of punctuation, or line break with the indentation that follows it.
PIECES = r"\s*\n[ \t]*| ?[^\W\d_]+|_+|\d{1,3}| ?[^\w\s]+|[ \t]+"


def licence(distribution: importlib.metadata.Distribution) -> str:
    """The licence a package declares: the SPDX expression, else its classifiers, else the short free text."""
    meta = distribution.metadata
    classifiers = [c for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    return meta.get("License-Expression") or "; ".join(classifiers) or (meta.get("License") or "")[:80]


def sources(sites: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield (package, file) for the standard library and every permissively licensed installed package."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield f"python-{sys.version_info.major}.{sys.version_info.minor}", path
    search = [*map(str, sites), *sys.path]
    seen: set[str] = set()
    for dist in sorted(importlib.metadata.distributions(path=search), key=lambda d: str(d.metadata["Name"]).lower()):
        name = f"{dist.metadata['Name']}-{dist.version}"
        declared = licence(dist)
        if name.lower() in seen or COPYLEFT.search(declared) or not PERMISSIVE.search(declared):
            continue
        seen.add(name.lower())
        for file in sorted(map(str, dist.files or [])):
            if file.endswith(".py"):
                yield name, Path(str(dist.locate_file(file)))


def is_held_out(data: bytes) -> bool:
    """Whether the file with these bytes belongs to the held-out set."""
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def collect(sites: list[Path], cap_mb: float) -> tuple[dict[str, dict[str, str]], dict[str, int]]:
    """Read the corpus: ``{"train"|"held_out": {name: text}}`` and the bytes taken from each package.

    Copies are dropped, as are generated or unreadable files; no package gives more than ``cap_mb``.
    """
    splits: dict[str, dict[str, str]] = {"train": {}, "held_out": {}}
    taken: dict[str, int] = {}
    digests: set[bytes] = set()
    entries = [(hashlib.sha256(str(p).encode()).digest(), name, p) for name, p in sources(sites)]
    for _, name, path in sorted(entries):  # hash order: a package that is capped gives a fair sample of its files
        try:
            data = path.read_bytes()
            text = data.decode("utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(re.sub(rb"\s+", b"", data)).digest()
        longest_line = max((len(line) for line in text.split("\n")), default=0)
        if digest in digests or len(data) < 256 or len(data) > 400_000 or longest_line > 400 or text.count("\n") < 8:
            continue
        if taken.get(name, 0) + len(data) > cap_mb * 1e6:
            continue
        digests.add(digest)
        taken[name] = taken.get(name, 0) + len(data)
        splits["held_out" if is_held_out(data) else "train"][f"{name}/{path.name}:{digest.hex()[:12]}"] = text
    return splits, taken


def train_tokenizer(texts: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer whose pieces keep a line break and its indentation together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(TokenizerRegex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def prepare(work: Path, sites: list[Path], vocab_size: int, context: int, cap_mb: float) -> PreTrainedTokenizerFast:
    """Collect and tokenize once; later runs read what the first one wrote under ``work``."""
    if (work / "corpus.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    work.mkdir(parents=True, exist_ok=True)
    print("reading the corpus ...", flush=True)
    splits, taken = collect(sites, cap_mb)
    rng = np.random.default_rng(0)
    train_names = sorted(splits["train"])
    sample = [splits["train"][train_names[i]] for i in rng.permutation(len(train_names))[:4000]]
    print(f"training the tokenizer on {len(sample)} files ...", flush=True)
    tokenizer = train_tokenizer(sample, vocab_size, context)
    tokenizer.save_pretrained(work / "tokenizer")
    for split, files in splits.items():
        names = sorted(files)
        order = rng.permutation(len(names)) if split == "train" else range(len(names))
        chunks = []
        for start in range(0, len(names), 256):
            batch = [files[names[i]] for i in order[start : start + 256]]
            encoded = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
            chunks += [np.array([tokenizer.eos_token_id, *ids], dtype=np.uint16) for ids in encoded]
        np.concatenate(chunks).tofile(work / f"{split}.bin")
    (work / "held_out.json").write_text(json.dumps(splits["held_out"]))
    info = {"packages": taken, "files": {split: len(files) for split, files in splits.items()}}
    info["bytes"] = {split: sum(len(t.encode()) for t in files.values()) for split, files in splits.items()}
    (work / "corpus.json").write_text(json.dumps(info, indent=1))
    return tokenizer


@torch.no_grad()
def bits_per_byte(model, tokenizer, files: dict[str, str]) -> dict[str, float]:
    """Held-out bits per byte of all files and of each package's, in windows that overlap by half the model's context.

    Every byte of every file is scored, from the file's start, in float32.
    """
    model.eval()
    context = model.config.max_position_embeddings
    sums: dict[str, list[float]] = {}
    for name, text in track(files.items(), description="scoring held-out files"):
        ids = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        nats, done = 0.0, 1  # targets ids[done:] are still to be scored
        while done < len(ids):
            start = max(0, done - context // 2)
            window = torch.tensor([ids[start : start + context]], device=model.device)
            logits = model(input_ids=window, use_cache=False).logits[0, done - start - 1 : -1].float()
            nats += torch.nn.functional.cross_entropy(logits, window[0, done - start :], reduction="sum").item()
            done = start + window.shape[1]
        for group in ("all", name.partition("/")[0]):
            total = sums.setdefault(group, [0.0, 0])
            total[0] += nats / math.log(2)
            total[1] += len(text.encode())
    return {group: bits / size for group, (bits, size) in sums.items()}


CARD = """---
license: apache-2.0
language: code
pipeline_tag: text-generation
---

# tiny-coder

A Llama-type network of {parameters:,} parameters that continues Python source. It exists so that `lookahead` can be
tried, tested and measured with no download; it is no assistant, and like all small models it soon repeats itself.

- **Shape**: {shape}. Byte-level BPE of {vocab:,} tokens,
  trained on the same files. A line break and the indentation behind it are one piece: a prompt should not end in one.
- **Data**: the Python standard library and permissively licensed packages, {train_mb:.0f} MB in {train_files:,} files
  after copies were dropped; at most {cap_mb:.0f} MB from one package. `training.json` lists every package, its version
  and its bytes. Licences are those that the packages declare (MIT, BSD, Apache-2.0, PSF, ISC).
- **Held out**: {held_files} files ({held_mb:.1f} MB), chosen by the SHA-256 of their bytes.
- **Bits per byte on the held-out files: {bpb:.3f}** (float32 evaluation of the shipped half-precision weights);
  {bpb_std:.3f} on those of the standard library. By package it goes from {low:.2f} to {high:.2f}: files that resemble
  others are easier.
- **Training**: {minutes:.0f} minutes on {device} (shared with other work), {seen_m:.1f} million tokens in windows of
  {context}, bfloat16 autocast, Muon for the matrices inside the layers and AdamW for the rest.
- **Licence of the weights**: Apache-2.0.

To train it again:

```
pip install --no-deps --target build/corpus -r examples/tiny_coder_corpus.txt
python examples/train_tiny_coder.py --site build/corpus --minutes {minutes:.0f}
```

The same script uses a GPU where there is one, and resumes where it was stopped.
"""


def optimizers(model, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms (AdamW for all on an old torch)."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    ids = {id(p) for p in inner}
    outer = [p for p in model.parameters() if id(p) not in ids]
    if not hasattr(torch.optim, "Muon"):
        return [torch.optim.AdamW(inner + outer, lr=lr, betas=(0.9, 0.95), weight_decay=0.05)]
    muon = torch.optim.Muon(inner, lr=lr, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def learning_rate(done: float) -> float:
    """Share of the peak rate after a share ``done`` of the training time: short warm-up, plateau, linear decay."""
    return min(1.0, (done + 1e-3) / 0.02) * min(1.0, max(0.0, 1.0 - done) / 0.55)


def train(model, data: np.ndarray, work: Path, minutes: float, batch: int, lr: float, compiled: bool, seed: int) -> int:
    """Train for ``minutes`` of training time in all, across restarts; returns the number of tokens seen."""
    device, context = model.device, model.config.max_position_embeddings
    opts = optimizers(model, lr)
    state_file = work / "state.pt"
    step, spent, seen = 0, 0.0, 0
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        step, spent, seen = state["step"], state["spent_s"], state["seen"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts]}
        torch.save({**state, "step": step, "spent_s": spent, "seen": seen}, work / "state.tmp")
        (work / "state.tmp").replace(state_file)

    forward = torch.compile(model) if compiled else model
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    log = (work / "log.jsonl").open("a")
    with Progress(*columns, refresh_per_second=0.5) as progress:
        bar = progress.add_task("training (s)", total=int(minutes * 60), completed=int(spent))
        last_save, smooth = spent, None
        model.train()
        try:
            while spent < minutes * 60:
                begin = time.monotonic()
                rng = np.random.default_rng((seed, step))
                # Walk the stream once in a fixed random order of windows before any window repeats.
                per_pass = (len(data) - 1) // context
                picks = np.arange(step * batch, (step + 1) * batch)
                order = np.random.default_rng((seed, int(picks[0] // per_pass))).permutation(per_pass)
                offset = int(rng.integers(0, context))
                starts = np.minimum(order[picks % per_pass] * context + offset, len(data) - context - 1)
                rows = np.stack([data[s : s + context + 1] for s in starts]).astype(np.int64)
                x = torch.from_numpy(rows).to(device)
                rate = lr * learning_rate(spent / (minutes * 60))
                for opt in opts:
                    for group in opt.param_groups:
                        group["lr"] = rate
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    logits = forward(input_ids=x[:, :-1], use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for opt in opts:
                    opt.step()
                    opt.zero_grad(set_to_none=True)
                value = loss.item()
                smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
                step, seen, spent = step + 1, seen + x[:, 1:].numel(), spent + time.monotonic() - begin
                progress.update(bar, completed=int(spent), description=f"step {step} loss {smooth:.3f} (s)")
                if step % 20 == 0:
                    log.write(json.dumps({"step": step, "s": round(spent, 1), "loss": round(smooth, 4)}) + "\n")
                    log.flush()
                if spent - last_save > 120:
                    save()
                    last_save = spent
        finally:
            save()
            log.close()
    return seen


def main(
    work: Annotated[Path, typer.Option(help="Folder for the corpus, the training state and the log.")] = Path(
        "build/tiny-coder"
    ),
    out: Annotated[Path, typer.Option(help="Where the finished model goes.")] = Path("lookahead/assets/tiny-coder"),
    site: Annotated[list[Path] | None, typer.Option(help="A further folder of installed packages.")] = None,
    minutes: Annotated[float, typer.Option(help="Training time in all, over restarts.")] = 95.0,
    layers: int = 6,
    hidden: int = 256,
    vocab: int = 4096,
    context: int = 1024,
    batch: int = 8,
    lr: float = 4e-3,
    cap_mb: Annotated[float, typer.Option(help="At most this many megabytes from one package.")] = 16.0,
    device: str = "auto",
    compiled: Annotated[bool, typer.Option(help="Use torch.compile.")] = True,
    seed: int = 0,
    evaluate: Annotated[bool, typer.Option(help="Only measure the model in --out.")] = False,
) -> None:
    """Train, evaluate and export the tiny coder; a second run with the same --work resumes."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = prepare(work, site or [], vocab, context, cap_mb)
    held_out = json.loads((work / "held_out.json").read_text())
    if evaluate:
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(device)
        bpb = bits_per_byte(model, tokenizer, held_out)
        print(f"{bpb['all']:.4f} bits per byte on {len(held_out)} held-out files")
        return
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(device)
    n_parameters = sum(p.numel() for p in model.parameters())
    data = np.memmap(work / "train.bin", dtype=np.uint16, mode="r")
    print(f"{n_parameters:,} parameters, {len(data):,} training tokens, {device}", flush=True)
    seen = train(model, data, work, minutes, batch, lr, compiled, seed)
    out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    bpb = bits_per_byte(model.float(), tokenizer, held_out)
    corpus = json.loads((work / "corpus.json").read_text())
    result = {"parameters": n_parameters, "tokens_seen": seen, "minutes": minutes, "device": device, "seed": seed}
    result |= {"torch": torch.__version__, "held_out_bits_per_byte": bpb, **corpus}
    (out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    shape = (
        f"{layers} layers of {hidden}, {config.num_attention_heads} heads, {config.num_key_value_heads} key/value heads"
    )
    card = CARD.format(
        parameters=n_parameters,
        shape=f"{shape}, context {context}",
        vocab=len(tokenizer),
        train_mb=corpus["bytes"]["train"] / 1e6,
        train_files=corpus["files"]["train"],
        cap_mb=cap_mb,
        held_files=corpus["files"]["held_out"],
        held_mb=corpus["bytes"]["held_out"] / 1e6,
        bpb=bpb["all"],
        bpb_std=next((value for name, value in bpb.items() if name.startswith("python-")), math.nan),
        low=min(bpb.values()),
        high=max(bpb.values()),
        minutes=minutes,
        device="a GPU" if device == "cuda" else f"{torch.get_num_threads()} CPU cores",
        seen_m=seen / 1e6,
        context=context,
    )
    (out / "README.md").write_text(card)
    print(f"{bpb['all']:.4f} bits per byte on {len(held_out)} held-out files; model written to {out}")


if __name__ == "__main__":
    typer.run(main)
