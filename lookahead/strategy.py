"""The documented home of what every strategy is made of; it lives in `lookahead.strategies.base`."""

from lookahead.strategies.base import CallContext as CallContext
from lookahead.strategies.base import Drafts as Drafts
from lookahead.strategies.base import RowContext as RowContext
from lookahead.strategies.base import Stats as Stats
from lookahead.strategies.base import Strategy as Strategy
