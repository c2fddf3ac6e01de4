"""_core.RankDeviceExchange's calls by the host engine, for tensors in host memory: how what stands above it is tested where there is
no GPU. One rank a process or thread, as adapters have it."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np

import heddle
from heddle import _core, device_exchange
from heddle.adapters import places

STREAM = 7


class OnHost:
    def __init__(self, group, options, device, ranks, deadline, sms):
        assert (device, ranks) == (0, 1)
        self.group = group if group is not None else heddle.thread_group(1)[0]
        self.core, self.refused = _core.RankExchange(self.group, options), 0
        self.ranks, self.first_rank = self.group.ranks, self.group.rank
        self.sent = ()

    @property
    def live(self):
        return self.group.live

    @property
    def bytes(self):
        return self.core.bytes

    def experts(self, local):
        return self.core.experts

    def dispatch(self, inputs, step, stream):
        assert stream == STREAM
        ((*self.sent, tokens),) = inputs
        assert tokens is None
        self.core.dispatch(*self.sent, step)

    def arrived(self, local):
        """Copies, since torch takes no arrays that are read-only; what a GPU alone knows is not told."""
        fields = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in self.core.arrived.items()}
        return fields | {"real": None, "received": fields["received"] if fields["host_waited"] else None}

    def combine(self, results, outputs, stream):
        assert stream == STREAM
        self.core.combine(results[0], outputs[0])

    def refuse(self, stream):
        self.refused += 1

    def reset(self, live):
        self.core.reset(live)

    def throw_if_failed(self):
        pass


@contextmanager
def standing_in():
    """torch's tensors in host memory are taken for those of GPU 0. Gives the exchanges that are made."""
    made = []

    def make(*given):
        made.append(OnHost(*given))
        return made[-1]

    torch_only = lambda array: type(array).__module__.partition(".")[0] == "torch"  # noqa: E731
    with ExitStack() as patches:
        for where, name, stand_in in (
            (device_exchange, "_core", SimpleNamespace(RankDeviceExchange=make)),
            (device_exchange, "need_cuda_part", lambda: None),
            (device_exchange, "current_stream", lambda array: STREAM),
            (places, "is_on_gpu", torch_only),
        ):
            patches.enter_context(mock.patch.object(where, name, stand_in))
        yield made
