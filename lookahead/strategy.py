"""The documented home of what every strategy is made of; it lives in `lookahead.strategies` and `lookahead.draft`."""

from lookahead.draft.context import CallContext as CallContext
from lookahead.draft.context import Drafts as Drafts
from lookahead.draft.context import RowContext as RowContext
from lookahead.draft.context import Wants as Wants
from lookahead.strategies.base import Stats as Stats
from lookahead.strategies.base import Strategy as Strategy
