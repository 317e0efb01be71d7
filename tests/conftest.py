"""What holds for all tests.

A shell that starts the tests in the background makes them ignore Ctrl-C, and with them every program they start. And
PyTorch's profiler library reads once in a process how much it says on stderr, which tests read: see trainer.profiling.
"""

import os
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
