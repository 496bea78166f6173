#!/usr/bin/env bash
# llguidance 1.9.1: where a grammar has come to an end that nothing can follow, a matcher's mask has the end tokens alone,
# and is_stopped() promises that it takes no more tokens but these. Yet it takes none: try_consume_tokens gives 0 for
# them, and validate_tokens, too. Where the grammar could go on, both give 1.
#
# Seen: [0-9]{2}: stopped True, mask [0], valid 0, consumed 0
#       [0-9]+: stopped False, mask [0, 2, 3], valid 1, consumed 1
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cat > "$room/end.py" <<'PYTHON'
import json

from llguidance import LLMatcher, LLTokenizer

words = {"<end>": 0, "a": 1, "1": 2, "2": 3}
added = [{"id": 0, "content": "<end>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}]
model = {"type": "BPE", "vocab": words, "merges": []}
decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
file = {"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder, "pre_tokenizer": decoder}
tokenizer = LLTokenizer(json.dumps(file), eos_token=0)
for pattern in ("[0-9]{2}", "[0-9]+"):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(pattern))
    assert matcher.try_consume_tokens([2, 3]) == 2
    stopped, bits = matcher.is_stopped(), matcher.compute_bitmask()[0]
    mask = [token for token in range(4) if bits >> token & 1]
    valid = matcher.validate_tokens([0])
    print(f"{pattern}: stopped {stopped}, mask {mask}, valid {valid}, consumed {matcher.try_consume_tokens([0])}")
PYTHON
python3 -m venv "$room/venv"
"$room/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 2> /dev/null
"$room/venv/bin/python" "$room/end.py" | tee "$room/seen"
diff "$room/seen" - <<'SEEN'
[0-9]{2}: stopped True, mask [0], valid 0, consumed 0
[0-9]+: stopped False, mask [0, 2, 3], valid 1, consumed 1
SEEN
