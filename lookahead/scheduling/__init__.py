"""Many requests on one device: sequences that join and leave between passes, each exactly as if it were alone.

`requests` has what is asked and what becomes of it, `prompts` reads several in a pass, `parts` what they begin with;
`row` is one that is written, `batch` has all that are, `scheduler` the queue. May import: strategies and below.
"""

from lookahead.scheduling.requests import Ticket as Ticket
from lookahead.scheduling.scheduler import Scheduler as Scheduler
