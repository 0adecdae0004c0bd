"""One thread, as in every run: results then do not depend on the machine's number of cores."""

import torch

torch.set_num_threads(1)
