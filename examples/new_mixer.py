"""Write a new token mixer on the operators of subquad, and train it in the four-stage skeleton on handwritten digits.

    python examples/new_mixer.py [EPOCHS]

The mixer gates a scan along polyline paths, whose decays depend on the input. Its cost is linear in the number of
tokens.
The script needs scikit-learn for the data (`pip install scikit-learn`) and takes less than a minute on two CPU cores.
"""
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad import kernels
from subquad.backbones.hierarchical import HierarchicalBackbone


class GatedScanMixer(nn.Module):
    """Gated mean of all tokens, weighted by the decay along polyline paths: (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, dim: int, num_heads: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.value = nn.Linear(dim, dim, **dd)
        self.gate = nn.Linear(dim, dim, **dd)
        self.step = nn.Linear(dim, 2 * num_heads, **dd)
        self.out = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.value(x).unflatten(-1, (self.num_heads, -1)).permute(0, 3, 1, 2, 4)     # (B, heads, H, W, D)
        # The logarithm of each step's decay is negative: softplus keeps it so.
        log_alpha, log_beta = (-F.softplus(self.step(x))).permute(0, 3, 1, 2).chunk(2, dim=1)  # (B, heads, H, W)
        # A channel of ones sums up the weights, by which the others are divided.
        heads = torch.cat([heads, torch.ones_like(heads[..., :1])], dim=-1)
        summed = kernels.polyline_scan(heads, log_alpha, log_beta, paths='both')
        mean = summed[..., :-1] / summed[..., -1:]
        return self.out(F.silu(self.gate(x)) * mean.permute(0, 2, 3, 1, 4).reshape(x.shape))


class GatedScanNet(HierarchicalBackbone):
    """The four-stage skeleton with the new mixer in every block."""

    def __init__(self, **kwargs: Any):
        def mixer(stage: int, block: int, dim: int, num_heads: int, **dd: Any) -> nn.Module:
            return GatedScanMixer(dim, num_heads, **dd)

        super().__init__(mixer, **kwargs)


def digits() -> tuple:
    """Return training images, training labels, test images and test labels; images are (N, 3, 32, 32)."""
    from sklearn.datasets import load_digits
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    images = F.interpolate(images, size=32, mode='bilinear').expand(-1, 3, -1, -1)
    labels = torch.from_numpy(data.target)
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def main(epochs: int) -> None:
    torch.manual_seed(0)
    model = GatedScanNet(dims=(32, 48, 64, 96), depths=(1, 1, 2, 1), num_heads=(2, 3, 4, 6), mlp_ratios=(3, 3, 3, 3),
                         head_hidden_size=128, num_classes=10)
    images, labels, test_images, test_labels = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps = epochs * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for epoch in range(epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
        print(f'epoch {epoch + 1}: loss {loss:.3f}, test accuracy {accuracy:.1%}')


if __name__ == '__main__':
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
