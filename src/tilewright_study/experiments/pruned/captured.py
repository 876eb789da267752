"""Pruned networks as CUDA graphs: one for each capacity, replayed for whatever lengths fit it."""

import bisect
from collections.abc import Sequence

import torch

from tilewright.core.errors import PatternError

# Calls before a capture: kernels are compiled and lists prepared in them.
WARM_UP = 3


class Captured:
    """A network of the family ``deit`` that is called with images and a capacity.

    On a GPU each capacity, and each shape of images, is captured in a CUDA graph when it is first asked for; on a CPU
    the network is called. Weights may be written to in place, and must stay where they are. ``layouts``: of the last
    call, after each pruning; what they hold is overwritten as logits are.
    """

    def __init__(self, network: torch.nn.Module, capacities):
        """capacities: tokens of a batch that graphs are made for; a call takes the least that is enough.

        Raises `PatternError` for none, or one below 1.
        """
        self.network, self.capacities = network, sorted(set(capacities))
        if not self.capacities or self.capacities[0] < 1:
            raise PatternError(f"capacities: expected at least one, of at least a token, found {list(capacities)}")
        self._graphs: dict = {}
        self.layouts: Sequence = ()

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor, capacity: int | None = None):
        """Logits [B, num_classes] of images [B, 3, R, R], in memory that the next such call overwrites on a GPU.

        capacity: most tokens that the images keep, as `deit.Network.forward` counts them; None: the largest there is.
        Nothing waits for the device: `check` raises where the capacity was too small; logits are NaN then.
        Raises `PatternError` for a capacity above all.
        """
        bucket = self.capacities[-1] if capacity is None else self._bucket(capacity)
        if not images.is_cuda:
            logits, self.layouts = self.network(images, bucket, True)
            return logits
        key = bucket, images.shape, images.dtype, images.device
        if key not in self._graphs:
            self._graphs[key] = self._capture(images, bucket)
        graph, inputs, logits, self.layouts = self._graphs[key]
        inputs.copy_(images)
        graph.replay()
        return logits

    def check(self) -> None:
        """Raise `PatternError` when the last call's images kept more than its capacity. Waits for the device."""
        for layout in self.layouts:
            layout.check()

    def _bucket(self, capacity):
        at = bisect.bisect_left(self.capacities, capacity)
        if at == len(self.capacities):
            raise PatternError(f"capacity: expected at most {self.capacities[-1]} tokens, found {capacity}")
        return self.capacities[at]

    def _capture(self, images, bucket):
        """``(graph, images, logits, layouts)``, the tensors being those that the graph reads and writes."""
        inputs = images.clone()
        stream = torch.cuda.Stream(images.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.network(inputs, bucket, True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, layouts = self.network(inputs, bucket, True)
        return graph, inputs, logits, layouts
