"""Exact lookahead decoding for transformers: the text of plain ``generate``, in fewer forward passes."""

from jacobi.errors import LookaheadError as LookaheadError
from lookahead.bundled import load_bundled as load_bundled
from lookahead.bundled import load_model as load_model
from lookahead.draft.latency import StepTimes as StepTimes
from lookahead.generation.output import LookaheadOutput as LookaheadOutput
from lookahead.medusa import Medusa as Medusa
from lookahead.patch import augment_all as augment_all
from lookahead.patch import restore_all as restore_all
from lookahead.stats import DecodingStats as DecodingStats
from lookahead.strategies.lookahead import Jacobi as Jacobi
from lookahead.strategies.lookahead import Lookahead as Lookahead

__version__ = "0.1.0"
