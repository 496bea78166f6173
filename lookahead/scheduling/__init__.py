"""Many requests on one device: sequences that join and leave between passes, each exactly as if it were alone.

`requests` has what is asked and what becomes of it, `rows` one sequence while it is written, `shared` the passes that
all sequences share, `scheduler` the loop. May import: strategies and below.
"""

from lookahead.scheduling.requests import Ticket as Ticket
from lookahead.scheduling.scheduler import Scheduler as Scheduler
