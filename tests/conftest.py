"""Settings of the whole suite."""

import torch

# The tensors of tests are small: threads would spend the cores waiting for each other.
torch.set_num_threads(1)
