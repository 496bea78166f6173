"""Multi-token prediction: layers that a model was trained with draft for it (DeepSeek-V3, arXiv 2412.19437)."""

from lookahead.sources.mtp.heads import MtpHeads as MtpHeads
from lookahead.strategies.mtp import Mtp as Mtp
