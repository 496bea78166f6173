"""Sources: who proposes tokens for the drafted tree, each from what it knows of the text.
:class:`Source` says how to write one of your own; heads that were trained to draft are in `lookahead.heads`.
May import: models, and runtime for draft models alone. It knows no planner."""

from lookahead.sources.base import BatchSource as BatchSource
from lookahead.sources.base import Candidate as Candidate
from lookahead.sources.base import Source as Source
from lookahead.sources.ngram_pool import PoolSource as PoolSource
from lookahead.sources.recycling import RecyclingSource as RecyclingSource
from lookahead.sources.successor_table import SuccessorTable as SuccessorTable
from lookahead.sources.suffix import SuffixAutomaton as SuffixAutomaton
from lookahead.sources.suffix import SuffixSource as SuffixSource
