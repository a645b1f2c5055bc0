"""Denoising by a tree over pixels: the order of the pixels matters."""
import pytest
import torch

from lab import denoising


@pytest.mark.slow
def test_morton_order_denoises_better_than_snake():
    record = denoising.denoising(2, orders=('morton', 'snake'))
    values = {metric['name']: metric for metric in record['metrics']}
    for kind in ('fields', 'mnist5k'):
        ratio = values[f'{kind}: error in Morton order / snake order, worst seed']
        assert ratio['value'] <= 0.95 and ratio['met']
        assert values[f'{kind}: error in snake order']['value'] < 0.6           # an empty picture has error 1


def test_denoiser_is_linear_and_identity_without_edges():
    train, _ = denoising.pictures('fields', 0, 4)
    model = denoising.LinearDenoiser(torch.randperm(256))
    x, y = train.flatten(1)[:2], train.flatten(1)[2:]
    torch.testing.assert_close(model(x + 2 * y), model(x) + 2 * model(y), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.edges.zero_()
        model.gain.fill_(1 / 16)
    torch.testing.assert_close(model(x), x)


@pytest.mark.slow
def test_drawn_picture(tmp_path):
    metrics = [{'name': f'{kind}: error in {order} order', 'value': 0.5} for kind in ('fields', 'mnist5k')
               for order in ('morton', 'snake')]
    denoising.draw({'metrics': metrics}, tmp_path / 'picture.png')
    assert (tmp_path / 'picture.png').stat().st_size > 10_000
