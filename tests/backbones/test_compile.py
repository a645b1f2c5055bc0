"""Test torch.compile with several image sizes. `dynamic=False` avoids an error of inductor."""
import pytest
import timm
import torch
from helpers import assert_close


def _two_sizes(name, **options):
    model = timm.create_model(name).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=False, **options)
    with torch.no_grad():
        for size in ((64, 64), (96, 64)):
            x = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
            assert_close(compiled(x), model(x), 1e-4)


def test_a_compiled_network_takes_a_second_size_without_inductor():
    """Inductor compiles C++ code, which takes minutes."""
    _two_sizes('test_mobilevitv2', backend='aot_eager')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['test_mobilevitv2', 'test_ppma', 'test_myo'])
def test_a_compiled_network_takes_a_second_size(name):
    _two_sizes(name)
