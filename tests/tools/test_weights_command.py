"""`subquad weights`: what list, info, download and verify print, their exit codes and their errors."""
import hashlib
import json

import pytest
from user_errors import command_error
from weights_server import Fault, WeightsServer, hub_environment, use_hub, weights_file

from subquad.backbones.weights import registry
from subquad.backbones.weights.registry import PublishedWeights
from subquad.tools import weights

CONTENT, OTHER = weights_file(seed=0), weights_file(seed=1)
SHA256 = hashlib.sha256(CONTENT).hexdigest()

pytestmark = pytest.mark.filterwarnings('ignore:.*is not known beforehand:UserWarning')


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with one hub file and one plain file, which the table lists in place of the weights in the package."""
    for name in [name for name, row in registry.WEIGHTS.items() if row.file]:
        monkeypatch.delitem(registry.WEIGHTS, name)
    with WeightsServer() as server:
        use_hub(monkeypatch, server, tmp_path)
        server.add_model('someone/nets', {'best.pth': CONTENT})
        url = server.add_file('/net.pt', CONTENT)
        for row in (PublishedWeights('test_ppma', 'served', 'classification', 'ppma', repo='someone/nets',
                                     filename='best.pth', reported={'top1': 12.5}),
                    PublishedWeights('test_mobilevitv2', 'plain', 'segmentation', 'cvnets', url=url)):
            monkeypatch.setitem(registry.WEIGHTS, row.name, row)
        yield server


def run(capsys, *arguments):
    """Return the exit code and the standard output of `subquad weights`."""
    code = weights.main(list(arguments)) or 0
    return code, capsys.readouterr().out


def test_list(server, capsys):
    code, text = run(capsys, 'list')
    assert code == 0 and all(name in text for name in registry.WEIGHTS)
    _, text = run(capsys, 'list', 'test_ppma')
    row = next(line for line in text.splitlines() if 'test_ppma.served' in line)
    assert 'classification' in row and '224x224' in row and 'top1 12.5' in row and 'yes' not in row
    run(capsys, 'download', 'test_ppma')
    assert 'yes' in run(capsys, 'list', 'test_ppma')[1]


@pytest.mark.parametrize('arguments, expected', [
    (['ppma_base.*', '--task', 'detection'], ['ppma_base.mask_rcnn_1x_coco', 'ppma_base.mask_rcnn_3x_coco']),
    (['050.ssdlite'], ['subquad_mobilevitv2_050.ssdlite_coco']),
    (['--task', 'segmentation', 'ppma_small.'],
     ['ppma_small.upernet_160k_ade20k', 'ppma_small.upernet_160k_cityscapes']),
    (['ppma_tiny.in1k', '--task', 'detection'], []),
], ids=str)
def test_list_filters(server, capsys, arguments, expected):
    rows = json.loads(run(capsys, 'list', *arguments, '--json')[1])
    assert [row['name'] for row in rows] == expected
    assert all(row['cached'] is None and row['source'] and row['license'] for row in rows)


def test_list_without_a_match():
    command_error(weights.main, ['list', 'ppma_tinny.in1k'], 'no weights match', 'did you mean ppma_tiny.in1k')


def test_info(server, capsys):
    text = run(capsys, 'info', 'test_ppma')[1]
    lines = dict(line.split(None, 1) for line in text.splitlines())
    assert lines['name'] == 'test_ppma.served' and lines['reported'] == 'top1 12.5' and 'locked' not in lines
    assert lines['source'] == 'hf-hub:someone/nets@main/best.pth' and 'cached' not in lines
    path = run(capsys, 'download', 'test_ppma')[1].strip()
    row = json.loads(run(capsys, 'info', 'test_ppma.served', '--json')[1])
    assert row['cached'] == path and row['locked']['sha256'] == SHA256 and row['input_size'] == [3, 224, 224]


def test_download(server, capsys):
    code, text = run(capsys, 'download', 'test_*', 'test_ppma')
    paths = text.splitlines()
    assert code == 0 and len(paths) == 2 and all(open(path, 'rb').read() == CONTENT for path in paths)
    rows = json.loads(run(capsys, 'download', 'test_*', '--json')[1])
    assert rows == [dict(name=name, path=path, size=len(CONTENT), sha256=SHA256)
                    for name, path in zip(('test_ppma.served', 'test_mobilevitv2.plain'), paths)]
    assert len(server.got(server.blob(CONTENT))) == len(server.got('/net.pt')) == 1


def test_download_update(server, capsys):
    run(capsys, 'download', 'test_*')
    server.add_model('someone/nets', {'best.pth': OTHER})
    server.add_file('/net.pt', OTHER)
    for arguments, content in (([], CONTENT), (['--update'], OTHER), ([], OTHER)):
        _, text = run(capsys, 'download', 'test_*', *arguments)
        assert [open(path, 'rb').read() == content for path in text.splitlines()] == [True, True]


def test_download_errors(server):
    command_error(weights.main, ['download', 'ppma_tinny'], 'did you mean ppma_tiny')
    command_error(weights.main, ['download', 'zzz*'], "no weights match 'zzz*'")
    server.fail(server.blob(CONTENT), Fault('flip', 5))
    command_error(weights.main, ['download', 'test_ppma'], 'that the hub records',
                  'run `subquad weights download test_ppma.served` to download it again')


def test_verify(server, capsys):
    assert run(capsys, 'verify') == (0, 'no published weights are in the cache\n')
    paths = run(capsys, 'download', 'test_*')[1].splitlines()
    assert run(capsys, 'verify') == (0, 'test_ppma.served: ok\ntest_mobilevitv2.plain: ok\n')
    count = len(server.requests)
    for path in paths:
        with open(path, 'r+b') as file:
            file.write(b'wrong')
    code, text = run(capsys, 'verify', 'test_*', '--json')
    assert code == 1 and len(server.requests) == count
    assert all(f'instead of {SHA256[:16]}' in state for state in json.loads(text).values())
    assert open(paths[0], 'rb').read(5) == b'wrong', 'verify only looks'
    code, text = run(capsys, 'verify', 'ppma_tiny')
    assert code == 1 and text.startswith('ppma_tiny.in1k: not in the cache; `subquad weights download ppma_tiny.in1k`')


def test_verify_without_a_known_hash(server, capsys, tmp_path):
    run(capsys, 'download', 'test_mobilevitv2.plain')
    (tmp_path / 'subquad' / 'weights.lock.json').unlink()
    assert run(capsys, 'verify') == (0, 'test_mobilevitv2.plain: no known hash\n')


def test_verify_of_a_file_in_the_package(capsys):
    assert run(capsys, 'verify', 'test_ppma.digits') == (0, 'test_ppma.digits: ok\n')


def test_environment_of_the_command(server, tmp_path, python):
    """Endpoint, caches and offline mode are read from the environment, and an error is one line on stderr."""
    def command(**environment):
        return python("import subquad, subquad_cli\nfrom subquad.backbones.weights.registry import *\n"
                      "WEIGHTS['test_ppma.served'] = PublishedWeights('test_ppma', 'served', 'classification', 'ppma', "
                      "repo='someone/nets', filename='best.pth')\n"
                      "subquad_cli.main(['weights', 'download', 'test_ppma.served'])",
                      **{**hub_environment(server, tmp_path), **environment})
    done = command()
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path / 'hf' / 'hub')), done.stderr
    assert (tmp_path / 'subquad' / 'weights.lock.json').is_file()
    done = command(HF_HUB_OFFLINE='1', HF_HOME=str(tmp_path / 'other'), SUBQUAD_CACHE=str(tmp_path / 'new'))
    assert done.returncode == 2 and done.stderr == (
        'error: test_ppma.served cannot be downloaded: it is not in the cache, and HF_HUB_OFFLINE forbids downloads; '
        'unset HF_HUB_OFFLINE, then run `subquad weights download test_ppma.served`\n')
