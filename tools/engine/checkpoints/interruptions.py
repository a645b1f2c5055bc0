"""Stop training at SIGTERM or SIGINT with a checkpoint, and continue from such a checkpoint."""
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from mmengine.dist import all_reduce, broadcast_object_list, is_distributed, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop

from ...common.paths import write_text
from ..training.loops import ResumableTrainLoop, accumulating, position
from .runner_checkpoints import VALIDATED, AtomicCheckpointHook, save_interrupted

_REPEATED = 2.          # seconds in which a launcher may pass on the signal that a process has already received


def start_worker(worker_id: int, parent: int, init: Optional[Callable[[int], None]] = None) -> None:
    """Start a worker of a data loader that outlives a SIGTERM to the whole process group, as job schedulers send it.

    The main process, `parent`, finishes its step, for which it can need the worker, and ends its
    workers itself. `init` is the worker_init_fn of the data loader.
    """
    if hasattr(signal, 'sigwaitinfo'):                             # which Linux has, and macOS has not
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})     # before init, which could start threads
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if init is not None:
        init(worker_id)


def _end_with(parent: int) -> None:
    """End this process when its parent sends SIGTERM; from others the signal has no effect."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal.

    Attributes:
        code: Exit code of the process, 128 + the number of the signal.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class InterruptionHook(Hook):
    """Stops training after the step in which SIGTERM or SIGINT arrives, and writes a checkpoint.

    Before the first step, and at a second signal, training stops at once. A run that continues from a checkpoint
    validates first if validation follows the epoch of the checkpoint and the first run has not completed it.

    Raises:
        Interrupted: Training has stopped.
    """

    priority = 'LOWEST'

    def __init__(self):
        self.number: Optional[int] = None            # the signal that this process has received
        self.agreed: Optional[int] = None            # the signal that one of all processes has received
        # The same as a number that is copied from the device, and the end of the copy; read a step later.
        self.reduced: Tuple[Optional[torch.Tensor], Optional[torch.cuda.Event]] = None, None
        self.since, self.running, self.process = 0., False, os.getpid()
        self.complete = False                        # whether the last step has run

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT within the block; only a main thread can."""
        numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():
            numbers = []
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self.process:              # a data loader's worker must live until the step is finished
            return
        now = time.monotonic()
        if self.number is not None and 'RANK' in os.environ and now - self.since < _REPEATED:
            return
        if not self.running or self.number is not None:
            raise Interrupted(number)
        self.number, self.since = number, now
        with contextlib.suppress(OSError):           # print could be interrupted in the middle of another print
            what = ('the last step has run; training ends when its files are written' if self.complete else
                    'training stops after this step and writes a checkpoint')
            os.write(2, f'{signal.Signals(number).name}: {what}; a second signal stops it at once\n'.encode())

    def before_save_checkpoint(self, runner, checkpoint: Dict[str, Any]) -> None:
        if accumulating(runner) and not is_distributed():      # those of other processes would be missing
            checkpoint['gradients'] = [None if p.grad is None else p.grad.cpu() for p in runner.model.parameters()]

    def after_load_checkpoint(self, runner, checkpoint: Dict[str, Any]) -> None:
        if not runner._resume:
            return
        path = runner._load_from
        if 'optimizer' not in checkpoint and is_main_process():
            print(f'warning: {path} holds no state of the optimizer, which starts from zero', file=sys.stderr)
        for parameter, value in zip(runner.model.parameters(), checkpoint.get('gradients', ())):
            parameter.grad = None if value is None else value.to(parameter.device, copy=True)
        if isinstance(runner.train_loop, ResumableTrainLoop):
            runner.train_loop.continue_at(checkpoint.get('meta', {}), str(path))

    def before_train(self, runner) -> None:
        loop, note = runner.train_loop, Path(runner.work_dir) / VALIDATED
        if runner._resume and runner.iter and runner.val_loop is not None and isinstance(loop, ResumableTrainLoop):
            loop._decide_current_val_interval()
            due = [not loop.done and loop.epoch >= loop.val_begin and (
                loop.epoch % loop.val_interval == 0 or loop.epoch == loop.max_epochs)
                and not (note.is_file() and note.read_text() == str(loop.epoch))]
            broadcast_object_list(due)               # the folder of the main process decides
            if due[0]:
                runner.val_loop.run()

    def before_train_iter(self, runner, batch_idx: int, data_batch: Any = None) -> None:
        self.running = True

    def after_train_iter(self, runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.complete = runner.iter + 1 >= runner.max_iters
        if not self._stops(runner):
            return
        loop = runner.train_loop
        if not isinstance(loop, EpochBasedTrainLoop):
            save_interrupted(runner, f'iter_{runner.iter + 1}', dict(epoch=runner.epoch, iter=runner.iter + 1))
        elif batch_idx + 1 == len(loop.dataloader) or is_distributed() and accumulating(runner):
            return                                   # at the end of the epoch, or when all gradients are in the weights
        else:
            save_interrupted(runner, f'epoch_{runner.epoch}_step_{batch_idx + 1}',
                             position(runner.epoch, batch_idx + 1, len(loop.dataloader)))
        raise Interrupted(self.agreed)

    def after_train_epoch(self, runner) -> None:
        if self.agreed is not None and isinstance(runner.train_loop, EpochBasedTrainLoop):
            self._leave_between_epochs(runner, runner.epoch + 1)

    def after_val_iter(self, runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        # EMAHook has exchanged the weights, which must not be written now.
        if self.number is not None and not is_distributed() and self._is_written(runner, runner.epoch):
            raise Interrupted(self.number)

    def after_val_epoch(self, runner, metrics: Optional[Dict[str, float]] = None) -> None:
        if is_main_process():
            write_text(Path(runner.work_dir) / VALIDATED, str(runner.epoch))
        if self.running and self._stops(runner) and isinstance(runner.train_loop, EpochBasedTrainLoop):
            self._leave_between_epochs(runner, runner.epoch)

    def _leave_between_epochs(self, runner, epoch: int) -> None:
        if not self._is_written(runner, epoch):
            save_interrupted(runner, f'epoch_{epoch}', position(epoch, 0, len(runner.train_dataloader)))
        raise Interrupted(self.agreed)

    @staticmethod
    def _is_written(runner, epoch: int) -> bool:
        """Whether the checkpoint of this epoch has been written."""
        return any(hook.last_ckpt and hook.by_epoch and Path(hook.last_ckpt).name == hook.filename_tmpl.format(epoch)
                   for hook in runner.hooks if isinstance(hook, AtomicCheckpointHook))

    def _stops(self, runner) -> bool:
        """Whether one of the processes has received a signal; all processes call it, and get the same answer.

        With several processes, the answer is that of the step before, because reading the present one would wait for
        the device.
        """
        self.agreed = self.number
        if is_distributed():
            before, done = self.reduced
            number = torch.full((), self.number or 0, device=next(runner.model.parameters()).device)
            all_reduce(number, 'max')
            self.reduced = number.to('cpu', non_blocking=True), torch.cuda.Event() if number.is_cuda else None
            if number.is_cuda:
                self.reduced[1].record()
            if done is not None:
                done.synchronize()
            self.agreed = before.item() or None if before is not None else None
        return self.agreed is not None
