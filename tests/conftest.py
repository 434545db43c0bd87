"""One thread a process: a kernel's rounding depends on how many threads share its work, and ranks have one each."""

import atexit
import os
import shutil
import tempfile

import torch

# what was measured on this machine before must not choose what tests run
os.environ["HALOTILE_CACHE"] = tempfile.mkdtemp(prefix="halotile-cache-")
atexit.register(shutil.rmtree, os.environ["HALOTILE_CACHE"], ignore_errors=True)

torch.set_num_threads(1)
