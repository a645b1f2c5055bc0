"""Count the operators that reach a device: each is a launch or a few."""
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

_FREE = ('empty', 'empty_like', 'empty_strided', 'new_empty', '_unsafe_view', 'detach', 'promote_types')


class Dispatches(TorchDispatchMode):
    """Counts operators, without views and allocations, in the block.

    Args:
        inside: run the package's own code for its operators, and count what it calls.

    Attributes:
        names: how often each operator was called.
    """

    def __init__(self, inside=False):
        super().__init__()
        self.names, self.inside = Counter(), inside

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.inside and operator.namespace == 'subquad':
            with self:
                return operator.on_device(*args, **(kwargs or {}))
        schema = operator._schema
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        if not view and schema.name.removeprefix('aten::') not in _FREE:
            self.names[schema.name] += 1
        return operator(*args, **(kwargs or {}))

    @property
    def count(self):
        return sum(self.names.values())
