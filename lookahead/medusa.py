"""Medusa: extra heads guess the tokens after the next one from a model's last hidden state (arXiv 2401.10774)."""

from lookahead.heads.medusa.accuracies import CalibratedTree as CalibratedTree
from lookahead.heads.medusa.accuracies import HeadAccuracies as HeadAccuracies
from lookahead.heads.medusa.accuracies import grow_tree as grow_tree
from lookahead.heads.medusa.calibration import calibrate as calibrate
from lookahead.heads.medusa.choices import ChoiceTree as ChoiceTree
from lookahead.heads.medusa.choices import buffers as buffers
from lookahead.heads.medusa.choices import choices_from as choices_from
from lookahead.heads.medusa.heads import MedusaHeads as MedusaHeads
from lookahead.heads.medusa.heads import read_heads as read_heads
from lookahead.heads.medusa.heads import write_heads as write_heads
from lookahead.heads.medusa.strategy import Medusa as Medusa
from lookahead.models.output_layer import output_layer as output_layer
from lookahead.models.output_layer import output_sizes as output_sizes
