"""The count of launches and bytes, and the bounds that PPMA-T keeps."""
import pytest
import timm
import torch
from torch import nn

from lab.launches import count_launches, counting

pytest.importorskip('triton')


def test_views_and_allocations_are_no_launches():
    x = torch.empty(4, 8, device='meta')
    with counting() as found:
        x.T.reshape(2, 16)[:, 3:].unsqueeze(0).expand(5, -1, -1)              # reshape of a transpose copies
        torch.empty_like(x).view(32).detach()
        torch.promote_types(torch.float16, torch.float32)                     # an operator without tensors
    assert found.launches == {'clone': 1} and found.bytes == {'clone': 2 * 32 * 4}


def test_bytes_are_those_of_arguments_and_results_once():
    x, y = torch.empty(4, 8, device='meta'), torch.empty(8, device='meta').expand(4, 8)
    with counting() as found:
        x + y                                                                 # what is expanded is read once
        torch.mul(x, x.new_empty(4, 8), out=torch.empty(4, 8, device='meta'))
    assert found.bytes == {'add': (32 + 8 + 32) * 4, 'mul': 3 * 32 * 4}
    assert found.total == 2 and found.gigabytes == pytest.approx(672e-9)


def test_kernels_of_an_operator_count_one_by_one():
    from subquad.kernels import depthwise_conv
    x = torch.empty(2, 14, 14, 64, device='meta')
    weight, bias = torch.empty(64, 1, 3, 3, device='meta'), torch.empty(64, device='meta')
    with counting() as found:
        depthwise_conv(x, weight, bias, gelu=True, residual=True)
    assert found.launches == {'depthwise_conv_fwd': 1}
    assert found.bytes['depthwise_conv_fwd'] == 4 * (2 * x.numel() + weight.numel() + bias.numel())


def test_a_layer_counts_as_on_paper():
    layer, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU()).to('meta'), torch.empty(4, 8, device='meta')
    with torch.no_grad(), counting() as found:
        layer(x)
    assert found.launches == {'native_layer_norm': 1, 'addmm': 1, 'gelu': 1}
    assert found.bytes['gelu'] == 2 * 4 * 16 * 4


def test_ppma_tiny_stays_below_its_bounds():
    """An eager forward pass at 224, batch 128, bfloat16; it took 993 launches and 27.1 GB before these fusions."""
    found = count_launches('ppma_tiny')
    assert found.total <= 450 and found.gigabytes <= 17.2
    assert found.launches['depthwise_conv_fwd'] == 3 * 14 and found.launches['rotary_embedding_fwd'] == 14


@pytest.mark.slow
def test_other_networks_count_as_recorded():
    """Of networks without an operator of this package, at the same setting (see docs/kernels.md)."""
    assert count_launches('convnext_tiny').total == 138
    assert 'swin_tiny_patch4_window7_224' in timm.list_models() and count_launches(
        'swin_tiny_patch4_window7_224').gigabytes == pytest.approx(25.7, abs=0.1)
