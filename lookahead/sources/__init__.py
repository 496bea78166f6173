"""Sources of candidates for the drafted tree; see :class:`Source` for how to add one."""

from lookahead.sources.base import BatchSource as BatchSource
from lookahead.sources.base import Candidate as Candidate
from lookahead.sources.base import Source as Source
from lookahead.sources.jacobi_window import WindowSource as WindowSource
from lookahead.sources.ngram_pool import PoolSource as PoolSource
from lookahead.sources.recycling import RecyclingSource as RecyclingSource
from lookahead.sources.recycling import SuccessorTable as SuccessorTable
from lookahead.sources.suffix import SuffixAutomaton as SuffixAutomaton
from lookahead.sources.suffix import SuffixSource as SuffixSource
