"""Generation: one call of `generate`, from its checks to its output.

`decode` reads the whole method on one screen; the fallback to transformers' own loop is here too.
May import: everything but strategies, training and the command line.
"""
