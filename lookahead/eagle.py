"""EAGLE: a head of one decoder layer drafts from a model's features (arXiv 2401.15077, 2406.16858, 2503.01840)."""

from lookahead.heads.eagle.head import EagleHead as EagleHead
from lookahead.heads.eagle.settings import EagleSettings as EagleSettings
from lookahead.heads.eagle.strategy import Eagle as Eagle
from lookahead.heads.eagle.training import TrainedEagle

fit, train = TrainedEagle.fit, TrainedEagle.trained
