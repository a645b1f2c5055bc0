"""The user's own MNIST, CIFAR-10 and Long Range Arena files: read right, and refused in one sentence when damaged."""
import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import listops_text
from mmengine.registry import DATASETS
from PIL import Image
from user_errors import user_error

from subquad.tools.data import listops, lra, pathfinder, released_files, sequences

# ---- MNIST

def _idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f'>{array.ndim}I', *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """Forty images to train, compressed, and ten to test, plain, in different folders."""
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (50, 28, 28), dtype=np.uint8), rng.integers(0, 10, 50, dtype=np.uint8)
    (tmp_path / 'train-images-idx3-ubyte.gz').write_bytes(gzip.compress(_idx(pixels[:40])))
    (tmp_path / 'train-labels-idx1-ubyte.gz').write_bytes(gzip.compress(_idx(labels[:40])))
    (tmp_path / 't10k-images.idx3-ubyte').write_bytes(_idx(pixels[40:]))
    (tmp_path / 't10k-labels-idx1-ubyte').write_bytes(_idx(labels[40:]))
    return tmp_path, pixels, labels


def test_mnist(mnist):
    folder, pixels, labels = mnist
    for split, chosen in (('train', slice(0, 36)), ('val', slice(36, 40)), ('all', slice(0, 40)),
                          ('test', slice(40, 50))):
        read = released_files.mnist_arrays(str(folder), split)
        np.testing.assert_array_equal(read[0], pixels[chosen])
        np.testing.assert_array_equal(read[1], labels[chosen])
    data = DATASETS.build(dict(type='MNIST', root=str(folder), split='test'))
    assert len(data) == 10 and data[3]['label'] == labels[43]
    torch.testing.assert_close(data[3]['inputs'][0] * 0.3081 + 0.1307, torch.from_numpy(pixels[43] / 255).float())
    small = dict(input_size=(1, 16, 16), mean=(0.13,), std=(0.31,), crop_pct=1.)
    assert sequences.MNIST(folder, 'test', small)[0]['inputs'].shape == (1, 16, 16)
    assert sequences.MNIST(folder, 'test', dict(input_size=(3, 32, 32)))[0]['inputs'].shape == (3, 32, 32)
    user_error(lambda: sequences.MNIST(folder, 'test', dict(input_size=(1, 16, 16))), 'a mean and a std of one value')
    user_error(lambda: sequences.MNIST(folder, 'test', dict(input_sise=3)), 'input_sise')
    raw = folder / 'torchvision' / 'MNIST' / 'raw'
    raw.mkdir(parents=True)
    for file in folder.glob('*ubyte*'):
        file.rename(raw / file.name)
    assert len(released_files.mnist_arrays(str(folder / 'torchvision'), 'all')[0]) == 40


def test_damaged_mnist(mnist):
    folder, pixels, labels = mnist

    def read(split='test'):
        return released_files.mnist_arrays(str(folder), split)
    images, answers = folder / 't10k-images.idx3-ubyte', folder / 't10k-labels-idx1-ubyte'
    for content, words in (
            (_idx(pixels[40:])[:-1], ('7839 values', '10 x 28 x 28')), (_idx(pixels[40:])[:9], ('truncated',)),
            (b'', ('nothing',)), (b'\x89PNG1234', ('89504e47',)), (b'\0\0\x08\3' + b'\xff' * 12, ('0 values',)),
            (_idx(pixels[40:]) + b'\0', ('7841 values',)), (_idx(labels), ('00000801', '00000803')),
            (_idx(pixels[:3]), ('3 images', '10 labels')), (_idx(pixels[:0]), ('0 images',))):
        images.write_bytes(content)
        user_error(read, str(images), *words)
    images.write_bytes(_idx(pixels[40:]))
    answers.write_bytes(_idx(labels[40:] + 10))
    user_error(read, str(answers), 'digits are 0 to 9')
    answers.unlink()
    user_error(read, 'no t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz')
    packed = folder / 'train-images-idx3-ubyte.gz'
    for content in (packed.read_bytes()[:-20], b'no gzip', packed.read_bytes()[:200] + b'\xff' * 300):
        packed.write_bytes(content)
        user_error(lambda: read('train'), str(packed), 'download it again')
    user_error(lambda: read('training'), "'train', 'val', 'all', 'test', got 'training'")
    user_error(lambda: released_files.mnist_arrays(str(folder / 'none'), 'test'), 'no folder',
               'train-images-idx3-ubyte')


# ---- CIFAR-10

def _python2_batch(pixels, labels):
    """The bytes that Python 2 and numpy 1 wrote, opcode by opcode."""
    content = pixels.tobytes()
    shape = b'(K' + bytes([len(pixels)]) + b'J' + struct.pack('<i', 3072) + b't'
    dtype = (b'cnumpy\ndtype\n(U\x02u1K\0K\x01tR'
             b'(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb')
    array = (b'cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\x01btR'
             b'(K\x01' + shape + dtype + b'\x89T' + struct.pack('<i', len(content)) + content + b'tb')
    numbers = b''.join(b'K' + bytes([n]) for n in labels)
    return b'\x80\x02}(U\x0bbatch_labelU\x04testU\x04data' + array + b'U\x06labels](' + numbers + b'eu.'


@pytest.fixture
def cifar(tmp_path):
    """Five batches of six images to train, each pickled in another way, and one of six to test."""
    rng = np.random.default_rng(0)
    folder = tmp_path / 'cifar-10-batches-py'
    folder.mkdir()
    pixels, labels = rng.integers(0, 256, (36, 3072), dtype=np.uint8), rng.integers(0, 10, 36)
    for n, name in enumerate([*(f'data_batch_{k}' for k in range(1, 6)), 'test_batch']):
        part, numbers = pixels[6 * n:6 * n + 6], labels[6 * n:6 * n + 6].tolist()
        keys = ('data', 'labels') if n % 2 else (b'data', b'labels')
        (folder / name).write_bytes(pickle.dumps(dict(zip(keys, (part, numbers))), n + 1) if n < 5
                                    else _python2_batch(part, numbers))
    return tmp_path, pixels.reshape(-1, 3, 32, 32), labels


def test_cifar(cifar):
    folder, pixels, labels = cifar
    for split, chosen in (('train', slice(0, 27)), ('val', slice(27, 30)), ('all', slice(0, 30)),
                          ('test', slice(30, 36))):
        for root in (folder, folder / 'cifar-10-batches-py'):
            read = released_files.cifar10_arrays(str(root), split)
            np.testing.assert_array_equal(read[0].transpose(0, 3, 1, 2), pixels[chosen])
            np.testing.assert_array_equal(read[1], labels[chosen])
    assert released_files.part_of(50_000, 'train') == slice(0, 45_000)
    data = DATASETS.build(dict(type='CIFAR10', root=str(folder), split='test'))
    mean, std = (torch.tensor(x)[:, None, None] for x in (data.mean, data.std))
    torch.testing.assert_close(data[2]['inputs'] * std + mean, torch.from_numpy(pixels[32] / 255).float())
    assert data.classes[3] == 'cat' and data[2]['label'] == labels[32]
    gray = sequences.CIFAR10(folder, 'test', dict(input_size=(1, 32, 32), mean=(0.48,), std=(0.25,), crop_pct=1.))
    assert gray[0]['inputs'].shape == (1, 32, 32)


class _Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_damaged_cifar(cifar):
    folder, pixels, _ = cifar
    file = folder / 'cifar-10-batches-py' / 'test_batch'
    whole, good = file.read_bytes(), dict(data=pixels[:2].reshape(2, -1), labels=[1, 2])

    def read():
        return released_files.cifar10_arrays(str(folder), 'test')
    for content in (whole[:-1], whole[:1000], b'', b'no pickle', whole[:300] + whole[301:], b'\x80\x04K'):
        file.write_bytes(content)
        user_error(read, str(file), 'download it again')
    for change in (dict(labels=[1, 10]), dict(labels=np.array([1, 2])), dict(labels=[True, 2]), dict(data=[1, 2]),
                   dict(data=good['data'].astype(np.float32)), dict(data=good['data'][:, :-1]),
                   dict(data=np.array([None, None]))):
        file.write_bytes(pickle.dumps({**good, **change}, 2))
        user_error(read, str(file), 'is not a CIFAR-10 batch')
    file.write_bytes(pickle.dumps([1, 2]))
    user_error(read, str(file), 'is not a CIFAR-10 batch')
    file.write_bytes(pickle.dumps({**good, 'labels': [1]}))
    user_error(read, '2 images, but 1 labels')
    for protocol in range(2, 6):
        file.write_bytes(pickle.dumps({**good, 'filenames': _Malicious(folder / 'made')}, protocol))
        user_error(read, str(file), 'could run code', 'mkdir')
    for name in (b'builtins\neval', b'numpy\nload', b'numpy\nfromfile', b'_codecs\ndecode', b'copyreg\n_reconstructor'):
        file.write_bytes(b'\x80\x02c' + name + b'\n(tR.')
        user_error(read, 'could run code', name.split(b'\n')[1].decode())
    assert not (folder / 'made').exists()
    file.unlink()
    user_error(read, 'no test_batch', 'cifar-10-python.tar.gz')
    user_error(lambda: released_files.cifar10_arrays(str(folder), 'dev'), "got 'dev'")


# ---- Long Range Arena

def _bracketed(text):
    """As the release writes it: each application in parentheses."""
    stack = []
    for token in text.split():
        stack.append(token)
        if token == ']':
            stack.pop()
            arguments = []
            while not stack[-1].startswith('['):
                arguments.append(stack.pop())
            tree = stack.pop()
            for argument in reversed(arguments):
                tree = f'( {tree} {argument} )'
            stack.append(f'( {tree} ] )')
    return stack[0]


@pytest.fixture
def tables(tmp_path):
    made = listops.listops(9, 0, 10, 60)
    (tmp_path / 'listops-1000').mkdir()
    for n, split in enumerate(('train', 'val', 'test')):
        rows = [f'{_bracketed(listops_text(made.sequence(i)))}\t{made.answers[i]}\r\n'
                for i in range(3 * n, 3 * n + 3)]
        (tmp_path / 'listops-1000' / f'basic_{split}.tsv').write_text('Source\tTarget\r\n' + ''.join(rows), newline='')
    return tmp_path, made


def test_lra_listops(tables):
    folder, made = tables
    data = DATASETS.build(dict(type='LRAListOps', root=str(folder), split='val', with_length=True))
    assert len(data) == 3 and data[1]['inputs'].shape == (2048,) and data[1]['label'] == made.answers[4]
    tokens = data[1]['inputs'][:data[1]['length']]
    assert tokens.tolist() == [*made.sequence(4), listops.EOS]
    assert len(sequences.LRAListOps(folder / 'listops-1000', 'train', length=None)) == 3


def test_damaged_lra_listops(tables):
    folder, _ = tables
    file = folder / 'listops-1000' / 'basic_test.tsv'

    def read():
        return lra.lra_listops(str(folder), 'test')
    head, good = 'Source\tTarget\n', '( ( ( [MAX 2 ) 3 ) ] )\t3\n'
    for line, words in (
            ('( ( ( [MAX 2 ) 3 )\t3', 'brackets'), ('[MAX 2 3 ]', '1 columns'), ('[MAX 2 3 ]\t', 'Target'),
            ('\t3', 'brackets'),
            ('[MAX 2 3 ]\t13', 'Target'), ('[MAX 2 3 ]\tx', 'Target'), ('[FIRST 2 3 ]\t2', 'not a digit, an operator'),
            ('[MAX 2 13 ]\t2', 'without a space'), ('2 3\t2', 'brackets'), ('[MAX 2 ] ]\t2', 'brackets'),
            ('[MAX 2 3 ]\t3\t3', '3 columns')):
        file.write_text(head + good + line + '\n')
        user_error(read, str(file), 'line 3', words)
    file.write_text(good)
    user_error(read, str(file), 'Source and Target')
    file.write_text(head)
    user_error(read, 'no expressions')
    file.unlink()
    user_error(read, 'no basic_test.tsv')
    user_error(lambda: lra.lra_listops(str(folder), 'dev'), "got 'dev'")
    user_error(lambda: sequences.LRAListOps(folder, 'train', length=5), 'length must be at least')


@pytest.fixture
def tree(tmp_path):
    """Twenty images of 32 x 32 in two folders; number 4 is empty, as one is in the release."""
    folder = tmp_path / 'pathfinder32' / 'curv_contour_length_14'
    (folder / 'metadata').mkdir(parents=True)
    pictures, labels = pathfinder.pathfinder_like(20, 0)
    for n, batch in enumerate((2, 10)):
        (folder / 'imgs' / str(batch)).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(pictures[10 * n + i]).save(folder / 'imgs' / str(batch) / f'sample_{i}.png')
        rows = [f'imgs/{batch} sample_{i}.png {i} {labels[10 * n + i]} 1.0 14 4 2 0.5 1 1\n' for i in range(10)]
        (folder / 'metadata' / f'{batch}.npy').write_text(''.join(rows))
    (folder / 'imgs' / '2' / 'sample_4.png').write_bytes(b'')
    return folder, pictures, labels


def test_lra_pathfinder(tree):
    folder, pictures, labels = tree
    root = str(folder.parent.parent)
    train, val, test = (DATASETS.build(dict(type='LRAPathfinder', root=root, split=split)) for split in lra.SPLITS)
    kept = np.delete(np.arange(16), 4)
    np.testing.assert_array_equal(train.labels, labels[kept])
    np.testing.assert_array_equal(val.labels, labels[16:18])
    np.testing.assert_array_equal(test.labels, labels[18:])
    np.testing.assert_array_equal(test.picture(1), pictures[19])
    assert test.mean == train.mean and test[0]['inputs'].shape == (1, 32, 32)
    values = torch.stack([item['inputs'] for item in train])
    assert abs(values.mean()) < 1e-5 and abs(values.std() - 1) < 1e-3
    assert sequences.LRAPathfinder(root, 'val', transform=dict(input_size=(3, 32, 32)))[0]['inputs'].shape[0] == 3


def test_damaged_lra_pathfinder(tree):
    folder, _, _ = tree
    root = str(folder.parent.parent)

    def read(split='train', **options):
        return sequences.LRAPathfinder(root, split, **options)
    (folder / 'imgs' / '2' / 'sample_3.png').write_bytes(b'no image')
    user_error(read, 'sample_3.png is not an image')
    Image.new('L', (16, 16)).save(folder / 'imgs' / '2' / 'sample_3.png')
    user_error(read, 'sample_3.png has 16 x 16 pixels, not 32 x 32')
    (folder / 'imgs' / '2' / 'sample_3.png').unlink()
    user_error(read, 'no image', 'sample_3.png')
    metadata = folder / 'metadata' / '10.npy'
    whole = metadata.read_text()
    for text, line in ((whole[:-30], 10), (whole[:-3], 10), (whole.replace('imgs/10 sample_2', '../../x sample_2'), 3),
                       (whole.replace('_2.png', '_2/../../x.png'), 3), (whole.replace('png 5 ', 'png 5 7 '), 6)):
        metadata.write_text(text)
        user_error(read, str(metadata), f'line {line}')
    for file in (folder / 'metadata').glob('*'):
        file.unlink()
    user_error(read, 'no metadata/0.npy')
    user_error(lambda: read(size=128), 'pathfinder128')
    user_error(lambda: read(size=33), 'size must be one of 32, 64, 128, 256, got 33')
    user_error(lambda: read(difficulty='hard'), "got 'hard'")
    user_error(lambda: read('all'), "'train', 'val', 'test', got 'all'")
    user_error(lambda: lra.lra_pathfinder(str(Path(root) / 'none'), 'train'), 'no folder')
