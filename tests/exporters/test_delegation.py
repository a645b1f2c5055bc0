"""Counting of multiply-adds and of operators outside of delegates."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subquad.tools.exporters.to_executorch import delegation, highest_rank, multiply_adds


class Layers(nn.Module):
    """A strided, a depthwise and a transposed convolution, a linear layer, and products."""

    def __init__(self):
        super().__init__()
        self.strided, self.depthwise = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.transposed, self.linear = nn.ConvTranspose2d(8, 4, 2, 2), nn.Linear(4, 5)

    def forward(self, x):
        y = self.linear(self.transposed(self.depthwise(self.strided(x))).permute(0, 2, 3, 1))
        return y @ y.transpose(2, 3)


def test_multiply_adds():
    graph = torch.export.export(Layers().eval(), (torch.zeros(2, 3, 8, 12),)).run_decompositions().graph
    positions = 2 * 4 * 6
    expected = positions * 8 * 3 * 9 + positions * 8 * 9         # strided, depthwise
    expected += positions * 8 * 4 * 4                            # transposed: every input meets all weights
    expected += 4 * positions * 4 * 5 + 2 * 8 * 12 * 12 * 5      # linear, product of each line (12, 5) with itself
    assert multiply_adds(graph) == expected


def test_multiply_adds_before_decomposition():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    assert multiply_adds(torch.export.export(layers, (torch.zeros(2, 3, 8, 12),)).graph) == 48 * 8 * (3 * 9 + 9)


def test_share_of_a_graph():
    program = torch.export.export(_Linear(), (torch.zeros(3, 4),))
    found = delegation(600, program.graph)
    assert found.delegated_macs == pytest.approx(1 - 3 * 4 * 5 / 600)
    assert found.operators == {'linear.default': 1, 'relu.default': 1} and found.delegates == 0
    assert delegation(0, torch.fx.Graph()).delegated_macs is None


def test_highest_rank():
    x = torch.zeros(2, 3, 4, 6)
    for shape, rank in (((6, 24), 4), ((6, 2, 2, 2, 3), 5)):
        module = _Reshape(shape)
        assert highest_rank(torch.export.export(module, (x,)).graph) == rank
    assert highest_rank(torch.fx.Graph()) == 0


class _Reshape(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, x):
        return x.reshape(self.shape).relu().reshape(-1)


class _Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 4))

    def forward(self, x):
        return F.linear(x, self.weight).relu()
