"""Speed, tokens a pass and exactness, measured: ``python -m benchmarks.race`` from the repository's root.

One module a question, each with ``--help``. They share ``options``, ``harness`` (the JSON document of a run, models,
statistics), ``tables``, ``contest`` (methods, prompts and the race in one process) and ``theory``. The last
line that each of them prints on stdout is one JSON document, with machine, versions, commit and argv; ``--out`` also
keeps it in a file. ``report`` writes BENCHMARKS.md and a page a question from such files.
"""
