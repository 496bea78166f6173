"""Speed, tokens a pass and exactness, measured: ``python -m benchmarks.race`` from the repository's root.

One module a question; ``racing`` holds what they share, and ``report`` writes BENCHMARKS.md from what they left.
"""
