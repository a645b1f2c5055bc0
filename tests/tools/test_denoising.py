"""What an order of pixels is worth to a tree over them: two seeds, fields and digits."""
import pytest
import torch

from subquad.tools.bench import denoising
from subquad.tools.common.cli import UserError


def test_morton_order_denoises_better_than_snake():
    record = denoising.denoising(2, orders=('morton', 'snake'))
    values = {figure['name']: figure for figure in record['figures']}
    for kind in ('fields', 'mnist5k'):
        ratio = values[f"{kind}, Morton's error over snake's, worst seed"]
        assert ratio['value'] <= 0.95 and ratio['met']
        assert values[f'{kind}, error, snake']['value'] < 0.6           # both do denoise: 1 is the empty picture


def test_the_solve_is_linear_and_the_order_its_own_inverse():
    train, _ = denoising.pictures('fields', 0, 4)
    model = denoising.LinearDenoiser(torch.randperm(256))
    x, y = train.flatten(1)[:2], train.flatten(1)[2:]
    torch.testing.assert_close(model(x + 2 * y), model(x) + 2 * model(y), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.edges.zero_()
        model.gain.fill_(1 / 16)
    torch.testing.assert_close(model(x), x)


def test_picture(tmp_path):
    figures = [{'name': f'{kind}, error, {order}', 'value': 0.5} for kind in ('fields', 'mnist5k')
               for order in ('morton', 'snake')]
    denoising.draw({'figures': figures}, tmp_path / 'picture.png')
    assert (tmp_path / 'picture.png').stat().st_size > 10_000
    with pytest.raises(UserError, match='cannot write'):
        denoising.draw({'figures': figures}, tmp_path / 'nowhere' / 'picture.png')
