"""One thread a process: a kernel's rounding depends on how many threads share its work, and ranks have one each."""

import torch

torch.set_num_threads(1)
