"""Comes before an installed ``transfer_queue`` on the path, and installs the drop-in (see ``transfer_queue_hook``)."""

import importlib
import sys

from transferqueue.adapters.transfer_queue_hook import install

install()
sys.modules[__name__] = importlib.import_module("transferqueue.adapters.transfer_queue")
