"""Medusa: extra heads guess the tokens after the next one from a model's last hidden state (arXiv 2401.10774)."""

from lookahead.models.output_layer import output_layer as output_layer
from lookahead.models.output_layer import output_sizes as output_sizes
from lookahead.sources.medusa.accuracies import CalibratedTree as CalibratedTree
from lookahead.sources.medusa.accuracies import HeadAccuracies as HeadAccuracies
from lookahead.sources.medusa.accuracies import grow_tree as grow_tree
from lookahead.sources.medusa.choices import ChoiceTree as ChoiceTree
from lookahead.sources.medusa.choices import buffers as buffers
from lookahead.sources.medusa.choices import choices_from as choices_from
from lookahead.sources.medusa.heads import MedusaHeads as MedusaHeads
from lookahead.sources.medusa.heads import read_heads as read_heads
from lookahead.sources.medusa.heads import write_heads as write_heads
from lookahead.strategies.medusa import Medusa as Medusa
from lookahead.training.medusa.calibration import calibrate as calibrate
