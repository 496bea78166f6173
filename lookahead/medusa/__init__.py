"""Medusa: extra heads on a model's last hidden state guess the tokens after the next one (arXiv 2401.10774)."""

from lookahead.medusa.choices import ChoiceTree as ChoiceTree
from lookahead.medusa.choices import buffers as buffers
from lookahead.medusa.choices import choices_from as choices_from
from lookahead.medusa.heads import MedusaHeads as MedusaHeads
from lookahead.medusa.heads import output_layer as output_layer
from lookahead.medusa.heads import output_sizes as output_sizes
