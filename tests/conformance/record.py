"""Record what becomes of every family, and make ``docs/models.md`` from the record.

python tests/conformance/record.py               judge all families, write routes.json and the document
python tests/conformance/record.py NAME ...      judge these families only
python tests/conformance/record.py --document    write the document only
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "lookahead" / "assets" / "routes.json"
DOCUMENT = ROOT / "docs" / "models.md"

_INTRODUCTION = """# Models

Every causal and every encoder-decoder family of transformers {version}, as `make conformance` finds it. A tiny random
model of each is made from its config, judged, and compared with plain `generate`: greedy and seeded sampling; alone and
in a batch padded on the left; texts longer than the sliding window; a second turn from the first one's cache; drafts
from the model's own text, from windows of several sizes, from Jacobi iterations and from the automatic mode; and traced
passes where the family has any. `tests/conformance/record.py` makes this page from that run.

| route | families | meaning |
|---|---|---|
| tree | {tree} | every draft is a tree; text, draws, scores and cache are those of plain decoding |
| chain | {chain} | linear drafts (one branch): a recurrent state or fixed positions rule out branches |
| plain | {plain} | falls back to transformers' own loop or is refused, with the reason, before anything is written |
| unbuilt | {unbuilt} | no small model could be made, so nothing is claimed; the self-test decides in a call |

`lookahead support --model DIR_OR_CONFIG` prints the verdict for one model of yours.

Quantised models keep their family's route. On a CPU (torchao 0.18, bitsandbytes 0.50, gguf 0.19; the extra
`quantised`), compared with plain `generate` by `tests/support/test_quantised_by_others.py` and
`tests/runtime/test_quantised_layers.py`; GPTQ and AWQ checkpoints (GPTQModel 7.7) and those of compressed-tensors 0.20
by hand, with SmolLM2-135M in 4 bits (8 bits: W8A8), on an EPYC with AVX-512:

| quantised by | rows of a layer | in float32 | in bfloat16 |
|---|---|---|---|
| `lookahead.quantize`, int8 and int4 | alike beside any others | refused | plain's text, or up to 512 positions |
| torchao, int8 weights | as torch's: made whole first | plain's text | tried: plain's text, or no promise |
| torchao, int8 weights and inputs | alike | refused: inputs are rounded, and little becomes much | plain's text |
| torchao, int4 weights | no kernel for a CPU in its layouts | not loaded | not loaded |
| bitsandbytes, nf4 and fp4 | alike | tree; no promise, as inputs are rounded to bfloat16 | plain's text |
| bitsandbytes, int8 | alike | refused, as torchao's | plain's text, or refused |
| GPTQ and AWQ, by GPTQModel | alike | plain's text | plain's text |
| compressed-tensors, W4A16 | made whole before the first pass, behind wrappers | plain's text | tree; no promise |
| compressed-tensors, W8A8 | the same | refused, as torchao's | tree; no promise |
| a GGUF file, or one that transformers makes whole | a plain layer's | plain's text | as any model in bfloat16 |

In bfloat16 layers of other packages are tried at a model's first call, with up to 256 rows: where each row has the same
outputs beside any others, the text is plain's as far as attention keeps it; else `lookahead support` says why not.
Three chat questions, greedy and at T 0.8, 96 tokens, the 135M model on two cores (tokens a pass; speed beside plain's,
medians of six; milliseconds of passes over 1 and 16 nodes): GPTQ 1.80, 1.64x, 13, 24; AWQ 1.93, 1.55x, 15, 27; W4A16
1.89, 1.64x, 31, 38; W8A8 1.67, 1.38x, 46, 58; torchao int8 1.81, 1.44x, 33, 41, inputs too 2.05, 1.54x, 58, 78; nf4
1.85, 1.53x, 18, 27; fp4 1.97, 1.71x, 18, 26. Passes of `lookahead.quantize`'s int8 take 6 over 2 and 9 over 17 nodes.
Of those said to be plain's no text differs; of torchao's int8, whose single rows round otherwise there, four of six.

The column bfloat16 says what holds there on a CPU with `Lookahead(repeatable=True)`: *plain* = the text of plain
`generate` where the machine's kernels compute one row as several, else the same text each time; *none* = neither, for
the reason in the last column ([more](internals/bits.md)).

| family | class | kind | route | attention | cache layers | tested in | bfloat16 | remark |
|---|---|---|---|---|---|---|---|---|
"""

_CLAIMS = {"DynamicLayer": "full", "DynamicSlidingWindowLayer": "sliding", "DynamicIndexedLayer": "indexed"}


def recorded() -> dict[str, dict[str, str]]:
    """The record: a family's key, and what was found."""
    families: list[dict[str, str]] = json.loads(RECORD.read_text())["families"]
    return {f"{found['family']}-{found['architecture']}": found for found in families}


def document(families: dict[str, dict[str, str]]) -> str:
    """The text of ``docs/models.md``."""
    counts = Counter(found["route"] for found in families.values())
    routes = {route: counts[route] for route in ("tree", "chain", "plain", "unbuilt")}
    lines = [_INTRODUCTION.format(version=json.loads(RECORD.read_text())["transformers"], **routes)]
    for _, found in sorted(families.items()):
        layers = ", ".join(_CLAIMS.get(kind, kind) for kind in found.get("cache", "").split(", "))
        cells = [*(found[name] for name in ("family", "architecture", "kind", "route")), found.get("attention", "")]
        remarks = [found.get("reason"), found.get("bfloat16_reason") and f"in bfloat16: {found['bfloat16_reason']}"]
        remark = "; ".join(filter(None, remarks)).replace("|", "\\|")
        row = [*cells, layers, found.get("dtype", ""), found.get("bfloat16", ""), remark]
        lines.append(f"| {' | '.join(row)} |\n")
    return "".join(lines)


def main() -> None:
    """Judge families and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families; none = all")
    parser.add_argument("--document", action="store_true", help="only write the document")
    given = parser.parse_args()
    if not given.document:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
        import transformers
        from conformance.checks import judged
        from conformance.families import FAMILIES

        import lookahead

        lookahead.augment_all()
        known = recorded() if RECORD.exists() and given.names else {}
        for family in FAMILIES:
            if not given.names or family.name in given.names:
                known[family.key] = judged(family)[0].to_dict()
                print(family.key, known[family.key]["route"], known[family.key].get("reason", ""), flush=True)
        families = [found for _, found in sorted(known.items())]
        whole = {"transformers": transformers.__version__, "families": families}
        RECORD.write_text(json.dumps(whole, indent=1) + "\n")
    DOCUMENT.write_text(document(recorded()))


if __name__ == "__main__":
    main()
