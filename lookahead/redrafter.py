"""ReDrafter: a recurrent head drafts from a model's last hidden state (arXiv 2403.09919)."""

from lookahead.heads.redrafter.head import RecurrentHead as RecurrentHead
from lookahead.heads.redrafter.head import RecurrentSizes as RecurrentSizes
from lookahead.heads.redrafter.settings import ReDrafterSettings as ReDrafterSettings
from lookahead.heads.redrafter.strategy import ReDrafter as ReDrafter
from lookahead.heads.redrafter.training import TrainedRecurrent

fit, train = TrainedRecurrent.fit, TrainedRecurrent.trained
