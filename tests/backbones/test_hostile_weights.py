"""Mutated weight files and metadata give a result or a one-sentence error, quickly and in little memory.

`predict`, `load_weights` and `convert` read the files. CI runs the short form, `make test-slow` the long form.
"""
import contextlib
import copy
import io
import json
import random
import re
import resource
import time
import traceback
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from subquad.backbones.weights import WeightsError, load_weights
from subquad.backbones.weights.convert import convert
from subquad.tools import predict
from subquad.tools.common.cli import UserError

SECONDS, BYTES = 20, 2 * 2 ** 30
OPTIONS = dict(dims=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], head_hidden_size=16, num_classes=3,
               drop_path_rate=0.1, attention=['crisscross', 'crisscross', 'full', 'full'])
METADATA = dict(model='test_ppma', options=OPTIONS, classes=['a', 'b', 'c'], epoch=3, transform=dict(
    input_size=[3, 32, 32], crop_pct=1.0, mean=[0.3, 0.3, 0.3], std=[0.4, 0.4, 0.4], interpolation='bilinear'))
CONFIG = (f"model = dict(type='TimmClassifier', name='test_ppma', "
          f"{', '.join(f'{key}={value!r}' for key, value in OPTIONS.items())})\n"
          f"test_dataloader = dict(dataset=dict(type='Digits', transform={METADATA['transform']}))\n")
HOSTILE = [None, True, False, 0, -1, 1, 2, 3, 7, 33, 1e308, float('nan'), float('inf'), 10 ** 6, 10 ** 12, 2 ** 70,
           '', 'x', '../x', '\0', 'y' * 5000, [], [0], [1, 2], [3, 2 ** 31, 2 ** 31], [[1]], {}, {'a': 1}, [None] * 4,
           'random', 'hf-hub:a/b', 'resnet18', 'vit_base_patch16_224', 'linear',
           [2048, 2048], [20_000] * 4, [100] * 4, ['a'] * 1000]
KEYS = ['checkpoint_path', 'pretrained', 'pretrained_cfg', 'features_only', 'device', 'depth', 'img_size', 'in_chans',
        'output_norms', 'layer_scale', 'paths', 'mask', 'auto_augment', 'use_naflex', 'crop_mode', '__class__', '']


def small_model():
    """Build a network of a few thousand weights."""
    return timm.create_model('test_ppma', **OPTIONS)


def originals(folder):
    """Return valid files: safetensors, both formats of torch.save, and a bare state dict."""
    torch.manual_seed(0)
    state = small_model().state_dict()
    runner = {'meta': dict(cfg=CONFIG, epoch=np.int64(3), dataset_meta=dict(classes=('a', 'b', 'c'))),
              'state_dict': {f'net.{key}': value for key, value in state.items()}}
    files = {name: folder / name for name in ('w.safetensors', 'runner.pth', 'older.pth', 'bare.pt')}
    save_file(state, files['w.safetensors'], {'subquad': json.dumps(METADATA)})
    torch.save(runner, files['runner.pth'])
    torch.save(runner, files['older.pth'], _use_new_zipfile_serialization=False)
    torch.save(state, files['bare.pt'])
    return {name: file.read_bytes() for name, file in files.items()}


def mutate(content, rng):
    """Change, cut, double or swap some bytes; the start of the file, where headers are, is changed more often."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        end = rng.choice((64, 4096, 32768, len(content)))
        at = rng.randrange(min(end, len(content)) or 1) if content else 0
        length = rng.choice((1, 2, 8, 100))
        kind = rng.randrange(7)
        if kind == 0:
            content[at:at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            content[at:at + 8] = rng.choice((b'\xff' * 8, b'\0' * 8, (2 ** 31 - 1).to_bytes(8, 'little')))
        elif kind == 2:
            del content[at:at + length]
        elif kind == 3:
            content[at:at] = content[at:at + length]
        elif kind == 4:
            content[at:at + 1] = bytes([content[at] ^ 1 << rng.randrange(8)]) if at < len(content) else b''
        elif kind == 5:
            content[at:at + length] = bytes(rng.choices(b'0123456789"[]{},:-eE', k=length))
        elif rng.random() < 0.3:
            del content[at:]
    return bytes(content)


def mutate_archive(content, rng):
    """Mutate one record of an archive and correct its checksum."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, 'w') as target:
        entries = source.infolist()
        chosen = entries[0] if rng.random() < 0.8 else rng.choice(entries)
        for entry in entries:
            data = source.read(entry)
            target.writestr(entry.filename, mutate(data, rng) if entry is chosen else data)
    return out.getvalue()


def mutated_metadata(rng):
    """Return metadata as text, with an entry replaced, added or removed, or with the text itself mutated."""
    metadata = copy.deepcopy(METADATA)
    for _ in range(rng.choice((1, 1, 2))):
        place = metadata if rng.random() < 0.3 else metadata[rng.choice(('options', 'transform'))]
        if not isinstance(place, dict) or not place:
            continue
        key = rng.choice([*place, rng.choice(KEYS)])
        if rng.random() < 0.1:
            place.pop(key, None)
        elif isinstance(place.get(key), list) and rng.random() < 0.5:
            place[key][rng.randrange(len(place[key]))] = rng.choice(HOSTILE)
        else:
            place[key] = rng.choice(HOSTILE)
        if not all(isinstance(metadata.get(part), dict) for part in ('options', 'transform')):
            break
    text = json.dumps(metadata)
    return mutate(text.encode(), rng).decode('utf-8', 'ignore') if rng.random() < 0.2 else text


def peak_memory():
    """Return the peak resident memory of this process in bytes. `getrusage` would count the test runner's, too: Linux
    passes a parent's peak on to the programs that it starts."""
    status = Path('/proc/self/status')
    if status.exists():
        return 1024 * int(re.search(r'VmHWM:\s+(\d+) kB', status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss   # macOS counts in bytes


def work(folder, first, files, blocks):
    """Load mutated files and print counts, tracebacks, the longest time and the peak memory as JSON."""
    folder = Path(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    image = folder / 'image.png'
    Image.new('RGB', (40, 40), (200, 30, 90)).save(image)
    valid, model = originals(folder), small_model()
    state = model.state_dict()
    names = [*valid, 'runner.pth']
    seen = dict(read=0, refused=0, failures=[], slowest=0.)
    for number in range(first, first + files + blocks):
        rng = random.Random(number)
        name = names[number % len(names)] if number < first + files else 'metadata.safetensors'
        path = folder / f'mutant-{name}'
        if number >= first + files:
            save_file(state, path, {'subquad': mutated_metadata(rng)})
        elif number % len(names) == len(valid):
            path.write_bytes(mutate_archive(valid[name], rng))
        else:
            path.write_bytes(mutate(valid[name], rng))
        (folder / 'now').write_text(str(number))
        named = ['--model', 'test_ppma'] if number % 2 or name == 'bare.pt' else []
        arguments = [str(path), str(image), '--json', *named]
        for call in (partial(load_weights, model, path), partial(predict.main, arguments),
                     partial(convert, path, folder / 'converted.safetensors', model)):
            started = time.process_time()
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    call()
                seen['read'] += 1
            except (WeightsError, UserError) as error:
                seen['refused'] += 1
                if len(str(error)) > 3000 or not str(error):
                    seen['failures'].append(f'{number} {name}: message of {len(str(error))} characters')
            except BaseException:
                seen['failures'].append(f'{number} {name}: {traceback.format_exc()[-900:]}')
            seconds = time.process_time() - started
            if seconds > seen['slowest']:
                seen['slowest'], seen['slowest_number'] = seconds, number
    seen['bytes'] = peak_memory()
    print(json.dumps(seen))


def _walk(python, folder, first, files, blocks):
    result = python(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                    f"import torch, subquad, test_hostile_weights as t; torch.set_num_threads(1)\n"
                    f"t.work({str(folder)!r}, {first}, {files}, {blocks})")
    now = folder / 'now'
    assert result.returncode == 0, f'at mutant {now.read_text() if now.exists() else None}: {result.stderr[-2000:]}'
    seen = json.loads(result.stdout.splitlines()[-1])
    assert not seen['failures'], '\n'.join(seen['failures'][:5])
    assert seen['slowest'] < SECONDS and seen['bytes'] < BYTES, seen
    assert seen['read'] and seen['refused'] and seen['read'] + seen['refused'] == 3 * (files + blocks), seen
    return seen


def test_mutated_files_load_or_raise_weights_error(python, tmp_path):
    _walk(python, tmp_path, 100_000, 60, 10)


@pytest.mark.long
@pytest.mark.parametrize('part', range(10))
def test_thousands_of_mutated_files_load_or_raise_weights_error(part, python, tmp_path):
    print(_walk(python, tmp_path, part * 1000, 850, 100))
