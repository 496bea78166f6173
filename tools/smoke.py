"""Whether an installed package is whole: its files, its C part, and texts equal to plain decoding's. Called with
``missing`` where it was installed without a compiler, and with ``built`` elsewhere."""

import io
import logging
import sys
from importlib.metadata import metadata
from pathlib import Path

import torch

import lookahead
from lookahead import _native

home = Path(lookahead.__file__).parent
assert "site-packages" in str(home), f"{home} is not an installed package"
for name in (
    "py.typed",
    "serve/chat.html",
    "pictures/trace.html",
    "assets/routes.json",
    "assets/tiny-coder/config.json",
):
    assert (home / name).exists(), f"{name} is missing"
assert metadata("lookahead-decoding")["Version"] == lookahead.__version__

assert (_native.speedups is not None) == (sys.argv[1] == "built"), f"the C part: {_native.missing or 'built'}"
said = io.StringIO()
logging.getLogger("lookahead").addHandler(logging.StreamHandler(said))

lookahead.augment_all()
model, tokenizer = lookahead.load_bundled()
inputs = tokenizer("def read_json(path):\n", return_tensors="pt")
for sample in (False, True):
    texts = []
    for use in (False, True):
        torch.manual_seed(0)
        texts.append(model.generate(**inputs, max_new_tokens=40, do_sample=sample, use_lookahead=use).tolist())
    assert texts[0] == texts[1]
assert said.getvalue().count("C part is missing: it was not built") == (sys.argv[1] == "missing"), said.getvalue()
print(f"lookahead {lookahead.__version__} from {home}: whole, and exact")
