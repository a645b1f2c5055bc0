"""The table of launch options: rows, targets, files of other tables, and errors of files that hold none."""

import pytest
import torch

from subquad.kernels.common import launch, launch_table
from subquad.kernels.common.launch_table import Key, Launch, Size

KERNEL = 'decay_attention_fwd'
ROW = Key(KERNEL, Size(2, 32, 16))


@pytest.fixture
def other_table(tmp_path, monkeypatch):
    """Write a table and name it by the environment variable."""
    def use(text):
        path = tmp_path / 'table.json'
        path.write_text(text if isinstance(text, str) else launch_table.formatted(text))
        monkeypatch.setenv(launch_table.VARIABLE, str(path))
        launch_table._loaded.cache_clear()
        launch_table._find.cache_clear()
        return path
    yield use
    launch_table._loaded.cache_clear()
    launch_table._find.cache_clear()


def test_shipped_table_is_what_formatted_writes():
    """A tuned table replaces the file without changes of its other rows."""
    assert launch_table.formatted(launch_table.read(launch_table.SHIPPED)) == launch_table.SHIPPED.read_text()


def test_every_tile_of_every_head_has_a_row():
    wide, narrow = (16, 32, 64, 128), (16, 32, 64)
    kernels = [(f'polyline_attention_running_{part}', wide, (16, 32)) for part in ('fwd', 'bwd')]
    kernels += [(f'decay_attention_{part}{line}', wide, (16, 32, 64))
                for part in ('fwd', 'bwd', 'transposed') for line in ('', '_line')]
    kernels += [(f'polyline_scan_{part}', narrow, (16, 32, 64)) for part in ('fwd', 'bwd')]
    # Tiles of 8 x 8 and of 16 x 16 nodes, which have a row for each number of nodes and channels.
    kernels += [(f'quadtree_solve_{part}', (channels,), (64 * channels, 256 * channels))
                for part in ('up', 'down_fwd', 'down_bwd') for channels in (1, 2, 4, 8, 16, 32)]
    kernels += [(f'quadtree_solve_{part}', (64,), (4096,)) for part in ('up', 'down_bwd', 'upper')]
    kernels += [('quadtree_solve_upper', (32,), (2048, 8192))]
    kernels += [('eos_matmul_bwd_sum', (16,), (64,))]
    for op in ('eos_matmul', 'eos_elementwise_full'):
        kernels += [(f'{op}_fwd', wide, (16,)), (f'{op}_fwd', (16,), (32,)), (f'{op}_bwd', wide, (16,))]
    kernels += [(f'eos_elementwise_{part}', (16, 32), (16, 32)) for part in ('fwd', 'bwd', 'memory')]
    for kernel, heads, tiles in kernels:
        for size in (2, 4):
            for channels in heads:
                for tile in tiles:
                    for backend, arch in (('cuda', '90'), ('cuda', '80'), ('hip', 'gfx942'), ('interpreter', '')):
                        found = launch_table.find(Key(kernel, Size(size, channels, tile)), backend, arch)
                        assert found.warps in (1, 2, 4, 8), (kernel, size, channels, tile)


def test_channels_and_target_choose_the_row(other_table):
    """The row with the fewest channels that suffice; between two such rows, that of the target."""
    size = {channels: Size(2, channels, 8) for channels in (16, 32, 64)}
    other_table({KERNEL: {'default': {size[16]: Launch(1, 1, None), size[64]: Launch(2, 1, None)},
                          'cuda': {size[32]: Launch(4, 1, None)}, 'cuda:90': {size[64]: Launch(8, 2, 128)}}})

    def found(channels, backend, arch):
        return launch_table.find(Key(KERNEL, Size(2, channels, 8)), backend, arch).warps
    assert [found(channels, 'cuda', '80') for channels in (8, 16, 17, 32, 64)] == [1, 1, 4, 4, 2]
    assert [found(channels, 'cuda', '90') for channels in (16, 32, 33, 64)] == [1, 4, 8, 8]
    assert [found(channels, 'hip', 'gfx942') for channels in (16, 32, 64)] == [1, 2, 2]
    with pytest.raises(ValueError, match='no row of decay_attention_fwd for 2 bytes an element, 65 channels'):
        found(65, 'cuda', '90')


def test_another_table_adds_rows_and_keeps_the_rest(other_table):
    before = launch_table.find(Key(KERNEL, Size(2, 32, 32)), 'cuda', '90')
    other_table({KERNEL: {'cuda:90': {ROW.size: Launch(8, 3, None)}}})
    assert launch_table.find(ROW, 'cuda', '90') == Launch(8, 3, None)
    assert launch_table.find(ROW, 'cuda', '80') == launch_table.read(launch_table.SHIPPED)[KERNEL]['default'][ROW.size]
    assert launch_table.find(Key(KERNEL, Size(2, 32, 32)), 'cuda', '90') == before


@pytest.mark.parametrize('text, message', [
    ('{"kernels"', 'JSONDecodeError'),
    ('[]', 'TypeError'),
    ('{}', 'kernels'),
    ('{"kernels": {"a": {"sm_90": []}}}', "a target is default, cuda, cuda:90, hip or hip:gfx942, not 'sm_90'"),
    ('{"kernels": {"a": {"default": [[2, 16, 16, 1, 2]]}}}', 'is not .bytes, channels, tile'),
    ('{"kernels": {"a": {"default": [[2, 16, "x", 1, 2, null]]}}}', 'is not .bytes, channels, tile'),
])
def test_bad_files_give_one_clear_error(text, message, other_table):
    path = other_table(text)
    with pytest.raises(ValueError, match=message) as caught:
        launch.options(KERNEL, torch.bfloat16, 16, 32)
    assert str(caught.value).startswith(launch_table.VARIABLE) and str(path) in str(caught.value)


def test_a_missing_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(launch_table.VARIABLE, str(tmp_path / 'none.json'))
    with pytest.raises(ValueError, match='cannot read the launch table .*none.json: FileNotFoundError'):
        launch.options(KERNEL, torch.bfloat16, 16, 32)
