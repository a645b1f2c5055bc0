"""Models as `subquad benchmark` names them: backend, compilation, autocast."""
import pytest
import torch
import torch.nn.functional as F

from subquad.tools.bench import networks
from subquad.tools.bench.comparisons import compare_models
from subquad.tools.bench.networks import Subject
from subquad.tools.common.cli import UserError


def test_names_of_models_are_read():
    assert networks.parse_model('ppma_tiny') == Subject('ppma_tiny')
    assert networks.parse_model('ppma_tiny@portable+compile') == Subject('ppma_tiny', 'portable', compile=True)
    assert networks.parse_model('swin+autocast+compile') == Subject('swin', None, compile=True, autocast=True)
    for wrong in ('a@gpu', 'a+fast', 'a+compile+compile', 'a+'):
        with pytest.raises(UserError, match='a model is NAME'):
            networks.parse_model(wrong)


@pytest.mark.parametrize('train', [False, True])
def test_autocast_is_on_for_the_model_that_asks_for_it(train, monkeypatch):
    seen = []
    monkeypatch.setattr(F, 'layer_norm', lambda x, *args, own=F.layer_norm: seen.append(x.dtype) or own(x, *args))
    for name in ('test_ppma', 'test_ppma+autocast'):
        networks.model_call(name, torch.zeros(1, 3, 64, 64), train)[0]()
    layers = len(seen) // 2
    assert seen == layers * [torch.float32] + layers * [torch.bfloat16] and layers == 10


@pytest.mark.slow
def test_models_under_autocast_are_compared_with_float32():
    record = compare_models(1, names=('test_ppma+autocast', 'test_ppma'), size=(64, 96), batch=2,
                            min_speedup={'test_ppma': 2})
    assert set(record['times_ms']) == {'test_ppma+autocast', 'test_ppma', 'gemm'}
    assert record['metrics'][0]['target'] == 2 and record['metrics'][0]['bound'] == 'at least'
