"""Multi-token prediction: layers that a model was trained with draft for it (DeepSeek-V3, arXiv 2412.19437)."""

from lookahead.heads.mtp.heads import MtpHeads as MtpHeads
from lookahead.heads.mtp.strategy import Mtp as Mtp
