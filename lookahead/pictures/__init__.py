"""Pictures of a decode: every pass as a tree, a time line, and the page that shows them.

A picture is made of what ``lookahead.watching`` saw. May import: what stands below it, generation included.
"""
