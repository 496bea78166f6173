"""ReDrafter: a recurrent head drafts from a model's last hidden state (arXiv 2403.09919)."""

from lookahead.heads.recipe import fit as fit
from lookahead.heads.recipe import train as train
from lookahead.heads.redrafter.head import RecurrentHead as RecurrentHead
from lookahead.heads.redrafter.head import RecurrentSizes as RecurrentSizes
from lookahead.heads.redrafter.strategy import ReDrafter as ReDrafter
from lookahead.training.settings import ReDrafterSettings as ReDrafterSettings
