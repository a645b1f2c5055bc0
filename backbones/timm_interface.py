"""timm's model interface, written once for all families: methods, default configs, the builder and initialization."""
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple, Type, TypeVar, Union

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import get_device_dtype, trunc_normal_
from timm.models import build_model_with_cfg, resolve_pretrained_cfg
from torch import Tensor, nn

from ._timm import feature_take_indices, narrow_head, pooled_width
from .options import check, known_options
from .weights import WeightsError, pretrained_filter
from .weights.download import SHIPPED
from .weights.files import remove_prefixes
from .weights.registry import WEIGHTS, PublishedWeights, find, of_arch
from .weights.resolve import ADDRESS, refuse_hybrid

Model = TypeVar('Model', bound=nn.Module)


def image_cfg(**kwargs: Any) -> Dict[str, Any]:
    """timm's default config of an ImageNet classifier with the skeleton's stem and head, updated with `kwargs`."""
    return {
        'num_classes': 1000,
        'input_size': (3, 224, 224),
        'pool_size': (7, 7),
        'crop_pct': 0.875,
        'interpolation': 'bicubic',
        'mean': IMAGENET_DEFAULT_MEAN,
        'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'stem.conv1.conv',
        'classifier': 'head.fc',
        'license': 'apache-2.0',
        **kwargs,
    }


def published_cfgs(untrained: Dict[str, Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """Return timm's default configs of architectures: one by 'arch.tag' for each published classifier.

    The first published classifier is the default of its architecture if it has as many classes as the network without
    weights. Otherwise the default is 'arch.untrained', so that `timm.create_model(arch)` keeps its number of classes.

    Args:
        untrained: architecture -> its config without weights.
    """
    cfgs: Dict[str, Dict[str, Any]] = {}
    for arch, cfg in untrained.items():
        classifiers = _classifiers(arch)
        cfgs.update({weights.name: {**cfg, **_published_entries(weights)} for weights in classifiers})
        if not classifiers or classifiers[0].num_classes != cfg['num_classes']:
            cfgs[f'{arch}.untrained*'] = cfg                 # the asterisk is timm's mark of a default
    return cfgs


def _classifiers(arch: str) -> List[PublishedWeights]:
    return [weights for weights in of_arch(arch) if weights.task == 'classification']


def _published_entries(weights: PublishedWeights) -> Dict[str, Any]:
    """Return the entries of timm's default config that published weights define."""
    return {
        'num_classes': weights.num_classes,
        'input_size': weights.input_size,
        'pool_size': tuple(side // 32 for side in weights.input_size[1:]),
        'crop_pct': weights.crop_pct,
        **({'crop_mode': weights.crop_mode} if weights.crop_mode != 'center' else {}),
        'interpolation': weights.interpolation,
        'mean': weights.mean,
        'std': weights.std,
        'license': weights.license,
        **_source_entries(weights),
    }


def _source_entries(weights: PublishedWeights) -> Dict[str, Optional[str]]:
    """Return the entries of timm's default config that say where published weights are."""
    revision = '' if weights.revision == 'main' else f'@{weights.revision}'
    filename = None if weights.filename == 'model.safetensors' else weights.filename     # timm's own default
    return {
        'hf_hub_id': f'{weights.repo}{revision}' if weights.repo else None,
        'hf_hub_filename': filename if weights.repo else None,
        'url': weights.url,
        'file': str(SHIPPED / weights.file) if weights.file else None,
    }


def build_model(
        cls: Type[Model],
        name: str,
        pretrained: bool,
        options: Dict[str, Any],
        feature_maps: int = 4,
        feature_cfg: Optional[Dict[str, Any]] = None,
) -> Model:
    """Build a registered model as timm does, with this package's checks of its options and of its weights.

    Args:
        cls: class of the model.
        name: timm name of the model, with or without a tag.
        pretrained: whether to load pretrained weights.
        options: keyword arguments of the entry point, for `cls` and for timm's builder.
        feature_maps: number of feature maps that `features_only=True` returns by default; 0 for a model without.
        feature_cfg: timm's arguments of `features_only=True` for a network without four stages, in place of
            `feature_maps`.

    Raises:
        ValueError: features_only=True for a model without feature maps.
    """
    if options.get('features_only') and not feature_maps:
        raise ValueError(f'{name} has no feature maps for features_only=True; an image backbone such as '
                         f"{name.partition('_')[0]}_tiny has them")
    feature_cfg = dict(feature_cfg or dict(out_indices=tuple(range(feature_maps)), flatten_sequential=True))
    if options.get('output_norms'):
        # `forward_intermediates` applies the output norms. timm's getter calls it, its default wrapper does not.
        feature_cfg.pop('flatten_sequential', None)
        feature_cfg.update(feature_cls='getter', norm=True)
    overlay = dict(options.get('pretrained_cfg_overlay') or {})
    if any(overlay.get(key) for key in ('file', 'url', 'hf_hub_id')):
        # Otherwise timm prefers published weights to an address, and looks for their file in another repository.
        overlay = {**dict.fromkeys(('file', 'url', 'hf_hub_id', 'hf_hub_filename')), **overlay}
    options = {**options, 'pretrained_cfg_overlay': overlay}
    file = _pretrained_file(name, options) if pretrained else ''
    if file:
        refuse_hybrid(file, {key: options[key] for key in ('mixers', 'attention_share') if options.get(key)})
        # timm passes a state dict to the filter as it is. The filter reads the file and removes this entry.
        overlay['state_dict'] = {'file': file}
    return build_model_with_cfg(
        cls,
        name,
        pretrained,
        pretrained_filter_fn=pretrained_filter(**options, file=file),
        feature_cfg=feature_cfg,
        **options,
    )


def _pretrained_file(name: str, options: Dict[str, Any]) -> str:
    """Return the file, published name or http address that `pretrained=True` loads, or '' if timm finds it.

    timm finds state dicts, `hf-hub:` and `local-dir:` that the caller gives.
    """
    try:
        cfg = resolve_pretrained_cfg(name, options.get('pretrained_cfg'), options['pretrained_cfg_overlay'])
    except RuntimeError as error:                        # an unknown tag
        found = find(f"{name}.{options['pretrained_cfg']}")
        raise WeightsError(f'{found.name} are weights for {found.task}, which timm does not have; to load their '
                           f"backbone, set features_only=True and pretrained_cfg_overlay=dict(file='{found.name}')"
                           ) from error
    if cfg.source or cfg.state_dict:
        return ''
    weights = WEIGHTS.get(f'{cfg.architecture}.{cfg.tag}')
    if weights and all(getattr(cfg, key) == value for key, value in _source_entries(weights).items()):
        return weights.name
    if cfg.file:
        return str(cfg.file)
    if cfg.url and cfg.url.startswith(ADDRESS) and not cfg.hf_hub_id:
        return cfg.url
    if cfg.has_weights:
        return ''
    raise WeightsError(_no_weights_message(str(cfg.architecture)))


def _no_weights_message(arch: str) -> str:
    """Say that an architecture has no pretrained weights without a tag, and which weights there are."""
    own = [weights.name for weights in _classifiers(arch)]
    if own:
        return f"pretrained=True needs a tag for {arch}: {', '.join(own)}"
    published = map(_classifiers, dict.fromkeys(weights.arch for weights in WEIGHTS.values()))
    names = [classifiers[0].name for classifiers in published if classifiers and not classifiers[0].page]
    return (f"no weights of {arch} are published; pretrained=True works for {', '.join(names)}, and "
            'pretrained_cfg_overlay=dict(file=FILE) loads a file of yours')


class TimmInterface(nn.Module):
    """Base class of the image backbones with the methods that timm expects of a model.

    A family sets `stem`, `stages`, `head` (a module with `fc` and `reset`), `feature_info`, `num_features`,
    `head_hidden_size` and, optionally, `output_norms`.

    Args:
        num_classes: number of classes; 0 for no classifier.
        in_chans: number of input channels.
    """

    def __init__(self, num_classes: int, in_chans: int):
        super().__init__()
        self.num_classes, self.in_chans = num_classes, in_chans
        self.output_norms: Optional[nn.ModuleList] = None

    def translate_checkpoint(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename the keys of published weights to this model's keys. Families with published weights override it."""
        return weights

    def options_in(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Return the options that weights with this model's keys show and that this model was built without."""
        return {}

    def published_state(self, weights: Dict[str, Any]) -> Dict[str, Any]:
        """Rename this model's weights to the names of its authors' files, the inverse of `translate_checkpoint`.

        Raises:
            WeightsError: there are no published names for the model or for one of its weights.
        """
        raise WeightsError(f'there are no published names for {type(self).__name__}')

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, also one with published names: timm's `checkpoint_path` takes the authors' classifiers.

        Raises:
            RuntimeError: keys or shapes differ; see `torch.nn.Module.load_state_dict`.
            WeightsError: the buffers of the authors' file do not fit this model.
        """
        if isinstance(state_dict, Mapping) and not state_dict.keys() <= self.state_dict().keys():
            state_dict = self.translate_checkpoint(remove_prefixes(dict(state_dict)))
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise RuntimeError(f'{error}\n\tsubquad.backbones.weights.load_weights(model, FILE) reads more files, and '
                               'says in one sentence what differs.') from error

    def set_input_size(self, img_size: Union[None, int, Tuple[int, int]] = None) -> None:
        """Check an image size. timm's models of a fixed size change theirs here; no weight of this model depends on it.

        Raises:
            ValueError: a side is below 32.
        """
        check(type(self).__name__, known_options(type(self)), {'img_size': img_size})

    def no_weight_decay(self) -> Set[str]:
        """Names of parameters without weight decay, apart from biases and norms. Families override it."""
        return set()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks' activations in the backward pass instead of keeping them."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The classifier, or nn.Identity if there is none."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Replace the classifier by a randomly initialized one.

        Args:
            num_classes: number of classes; 0 for no classifier.
            global_pool: name of the pooling; None keeps the current one.

        Raises:
            ValueError: the number of classes or the pooling is not allowed.
        """
        pooling = {} if global_pool is None else {'global_pool': global_pool}
        check(type(self).__name__, known_options(type(self)), {'num_classes': num_classes, **pooling})
        self.head.reset(num_classes, global_pool, **get_device_dtype(self))
        self.num_classes = num_classes
        self.head_hidden_size = pooled_width(self.head)
        self.head.fc.apply(init_linear)

    def forward_intermediates(
            self,
            x: Tensor,
            indices: Union[None, int, List[int]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
    ) -> Union[List[Tensor], Tuple[Tensor, List[Tensor]]]:
        """Return the outputs of the stages, and the output of `forward_features`.

        Args:
            x: images (B, in_chans, H, W).
            indices: indices of the stages to return; an integer n selects the last n, None selects all.
            norm: apply the output norms, if the model has them (`output_norms=True`).
            stop_early: do not run the stages after the last selected one.
            output_fmt: 'NCHW' or 'NHWC'.
            intermediates_only: return the list of stage outputs only.

        Returns:
            A tuple (features, list of stage outputs), or the list only.

        Raises:
            ValueError: `output_fmt` is neither 'NCHW' nor 'NHWC'.
        """
        if output_fmt not in ('NCHW', 'NHWC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages[:last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                y = x.permute(0, 2, 3, 1)
                y = self.output_norms[i](y) if norm and self.output_norms is not None else y
                intermediates.append(y if output_fmt == 'NHWC' else y.permute(0, 3, 1, 2))
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
            self,
            indices: Union[int, List[int]] = 1,
            prune_norm: bool = False,
            prune_head: bool = True,
    ) -> List[int]:
        """Remove the stages after the last selected one, and the head. Return the indices of the selected stages."""
        take, last = feature_take_indices(len(self.stages), indices)
        shorter = last < len(self.stages) - 1
        self.stages = self.stages[:last + 1]
        if prune_norm:
            self.output_norms = None
        elif self.output_norms is not None:
            self.output_norms = self.output_norms[:last + 1]
        if shorter or prune_head:
            self.num_features = self.feature_info[last]['num_chs']
            narrow_head(self.head, self.num_features)
            self.reset_classifier(0)
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last stage's output.

        Args:
            x: images (B, in_chans, H, W).

        Returns:
            (B, num_features, ceil(H/32), ceil(W/32)), unless the family's documentation says otherwise.
        """
        return self.stages(self.stem(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits (B, num_classes) from the output of `forward_features`.

        With `pre_logits`, return the input of the classifier, (B, head_hidden_size).
        """
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def init_linear(module: nn.Module) -> None:
    """Initialize linear layers from a normal distribution of standard deviation 0.02, cut at 2, and biases with 0."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def init_kaiming(module: nn.Module) -> None:
    """Initialize convolutions as He et al. do, with the fan of the output, and linear layers with `init_linear`."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode='fan_out')
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    init_linear(module)


def init_xavier(module: nn.Module) -> None:
    """Initialize linear layers as Glorot & Bengio do (Xavier uniform), and biases with 0."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
