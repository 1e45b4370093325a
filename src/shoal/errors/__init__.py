"""Every error that Shoal raises, one module per range of codes, in the order of the codes.

::

    ShoalError           S000  base
    ├── UsageError       S1xx  usage: command line, shoal.toml, arguments of the API     exit 2 or 3
    ├── MembershipError  S2xx  membership: tokens, versions, names, connections          exit 4
    ├── TrainingError    S3xx  training: the script, the model, the data                 exit 1
    ├── LaunchError      S4xx  launch: agents, processes, ports, machines                exit 4
    └── StorageError     S5xx  storage: journal, checkpoints, files                      exit 4

One class is one code, and a code never changes its meaning. The docstring of the class is what ``shoal explain CODE``
prints: what happened, why it happens, what to do. An error without a class of its own uses its family's (S100, S200,
…). Import every class from here; ``codes`` finds a class by its code.

The machine side of ``pack/remote`` loads this package on Python 3.7, so it must stay that old.

May import: exit_codes and the standard library.
"""

from shoal.errors.base import ShoalError as ShoalError
from shoal.errors.codes import catalog as catalog
from shoal.errors.codes import from_code as from_code
from shoal.errors.launch import *
from shoal.errors.membership import *
from shoal.errors.storage import *
from shoal.errors.training import *
from shoal.errors.usage import *
