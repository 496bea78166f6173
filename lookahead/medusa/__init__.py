"""Medusa: extra heads on a model's last hidden state guess the tokens after the next one (arXiv 2401.10774)."""

from lookahead.medusa.accuracies import CalibratedTree as CalibratedTree
from lookahead.medusa.accuracies import HeadAccuracies as HeadAccuracies
from lookahead.medusa.accuracies import grow_tree as grow_tree
from lookahead.medusa.backbone import output_layer as output_layer
from lookahead.medusa.backbone import output_sizes as output_sizes
from lookahead.medusa.calibration import calibrate as calibrate
from lookahead.medusa.checkpoints import read_heads as read_heads
from lookahead.medusa.checkpoints import write_heads as write_heads
from lookahead.medusa.choices import ChoiceTree as ChoiceTree
from lookahead.medusa.choices import buffers as buffers
from lookahead.medusa.choices import choices_from as choices_from
from lookahead.medusa.decoding import Medusa as Medusa
from lookahead.medusa.heads import MedusaHeads as MedusaHeads
