"""Self-distillation from the averaged weights: its value, its start, and what is refused."""
import pytest
import torch
from training_cases import fails

from subquad.backbones.weights import read_checkpoint
from subquad.tools import train
from subquad.tools.engine.classification.model import TimmClassifier
from subquad.tools.engine.config import find

CONFIG = 'test-ppma_digits-mesa'


def _arguments(work, *options, epochs=3):
    return [CONFIG, '--work-dir', str(work), '--epochs', str(epochs), '--cfg-options', 'train_dataloader.batch_size=8',
            'train_dataloader.num_batch_per_epoch=2', 'default_hooks.checkpoint.max_keep_ckpts=9',
            'optim_wrapper.optimizer.lr=0.05', 'custom_hooks.1.start_epoch=1', 'param_scheduler=[]', *options]


@pytest.fixture(scope='module')
def steps(tmp_path_factory):
    """A run of three epochs of two steps, MESA from the second on: (found, expected, terms) of each step."""
    folder, steps, losses = tmp_path_factory.mktemp('run'), [], TimmClassifier._losses

    def noted(model, logits, inputs, label):
        found = losses(model, logits, inputs, label)
        expected = None
        if model.mesa:
            with torch.no_grad():
                assert not any(module.training for module in model.mesa.net.modules())
                p = (model.mesa.net(inputs).double() / 2).softmax(-1)
                q = (logits.double() / 2).softmax(-1)
                expected = 0.7 * (p * (p.log() - q.log())).sum() / len(inputs)
        steps.append((found.get('loss_mesa'), expected, set(found)))
        return found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TimmClassifier, '_losses', noted)
        assert train.main(_arguments(folder, 'custom_hooks.1.weight=0.7', 'custom_hooks.1.temperature=2.0')) == 0
    return folder, steps


def test_the_divergence_is_added_from_the_start_epoch_on(steps):
    _, steps = steps
    assert len(steps) == 6 and [terms for _, _, terms in steps] == [{'loss'}] * 2 + [{'loss_label', 'loss_mesa'}] * 4
    for found, expected, _ in steps[2:]:
        assert expected > 1e-4
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)


def test_checkpoints_hold_the_average_once(steps):
    folder, _ = steps
    weights = read_checkpoint(folder / 'last.safetensors')[0]
    assert weights.keys() == TimmClassifier('test_ppma', num_classes=10).net.state_dict().keys()
    state = read_checkpoint(folder / 'epoch_3.pth')[0]
    assert state.keys() == weights.keys() and all(torch.equal(state[key], value) for key, value in weights.items())


def test_a_resumed_run_equals_an_undisturbed_one(steps, tmp_path):
    folder, _ = steps
    options = ('custom_hooks.1.weight=0.7', 'custom_hooks.1.temperature=2.0')
    assert train.main([*_arguments(tmp_path, *options), '--resume', str(folder / 'epoch_1.pth')]) == 0
    expected, found = (read_checkpoint(path / 'last.safetensors')[0] for path in (folder, tmp_path))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_mesa_that_never_acts_is_refused(tmp_path):
    work = tmp_path / 'run'
    fails(_arguments(work, 'custom_hooks.1.start_epoch=3'), 'start_epoch=3 is not before the end of 3 epochs')
    config = tmp_path / 'config.py'
    config.write_text(f'_base_ = {str(find("test-ppma_digits"))!r}\ncustom_hooks = [dict(type="MESAHook")]\n')
    fails([str(config), '--work-dir', str(work)], 'MESAHook needs the averaged weights of a ModelEMAHook')
    assert not list(work.glob('*'))
