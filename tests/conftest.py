import os
import sys

import torch

# Where there is no GPU the Triton kernels run in Triton's interpreter, which must be asked for before its import.
if not torch.cuda.is_available() and 'triton' not in sys.modules:
    os.environ.setdefault('TRITON_INTERPRET', '1')

import subquad  # noqa: F401  (before timm: it mends a torchvision of another build)
