"""ReDrafter: a recurrent head drafts from a model's last hidden state (arXiv 2403.09919)."""

from lookahead.sources.redrafter.head import RecurrentHead as RecurrentHead
from lookahead.sources.redrafter.head import RecurrentSizes as RecurrentSizes
from lookahead.strategies.redrafter import ReDrafter as ReDrafter
from lookahead.training.heads import fit as fit
from lookahead.training.heads import train as train
from lookahead.training.settings import ReDrafterSettings as ReDrafterSettings
