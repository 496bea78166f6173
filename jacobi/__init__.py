"""The solver under `lookahead`: token trees, verification and the decoding loop. Torch and numpy only."""

from jacobi.drafter import Drafter as Drafter
from jacobi.drafter import PlainDrafter as PlainDrafter
from jacobi.drafter import Successors as Successors
from jacobi.drafter import Wants as Wants
from jacobi.errors import LookaheadError as LookaheadError
from jacobi.fixed_point import JacobiDrafter as JacobiDrafter
from jacobi.fixed_point import JacobiMode as JacobiMode
from jacobi.fixed_point import guesser as guesser
from jacobi.solve import AsynchronousModel as AsynchronousModel
from jacobi.solve import GreedyVerifier as GreedyVerifier
from jacobi.solve import Model as Model
from jacobi.solve import Scores as Scores
from jacobi.solve import Step as Step
from jacobi.solve import Verifier as Verifier
from jacobi.solve import solve as solve
from jacobi.tree import TokenTree as TokenTree
from jacobi.tree import ancestor_bits as ancestor_bits
from jacobi.tree import branch_mask as branch_mask
from jacobi.verify import Path as Path
from jacobi.verify import chances_of as chances_of
from jacobi.verify import longest as longest
from jacobi.verify import reject as reject
from jacobi.verify import traverse as traverse
from jacobi.verify import walk as walk
