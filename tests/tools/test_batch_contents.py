"""What messages say of batches: labels out of range, and too few samples."""
import pytest

from subquad.tools.common.cli import UserError


def test_an_index_out_of_range_on_a_gpu_is_explained(tmp_path):
    from subquad.tools.engine.training.run import _explained
    error = RuntimeError('CUDA error: device-side assert triggered')
    text = str(_explained(error, tmp_path, 'training state saved in x.pth'))
    assert text == ('an index is out of range on the GPU, most likely a label for which the model has no class; with '
                    'the environment variable CUDA_VISIBLE_DEVICES= training runs on the CPU, which names it; training '
                    'state saved in x.pth')


def test_drop_last_counts_the_samples_of_each_process(monkeypatch):
    from subquad.tools.engine.training.building import check_batch_size
    check_batch_size(dict(drop_last=True, batch_size=6), range(11), 'train')
    monkeypatch.setenv('WORLD_SIZE', '2')
    check_batch_size(dict(drop_last=True, batch_size=6), range(11), 'train')
    with pytest.raises(UserError, match='has 11 samples for 3 processes, fewer than batch_size=6 each, and drop_last'):
        monkeypatch.setenv('WORLD_SIZE', '3')
        check_batch_size(dict(drop_last=True, batch_size=6), range(11), 'train')
