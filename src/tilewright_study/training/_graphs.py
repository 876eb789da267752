"""Losses and gradients as CUDA graphs: what a step launches is recorded once, and replayed for other images.

A step launches a thousand kernels. One by one they take the host longer than a GPU: of the 43 to 49 ms that a compiled
step of SegFormer-B0 took on an H200, its kernels took 16.
"""

import torch

# Calls before a recording: libraries choose their kernels in them, and initialise the stream.
WARM_UP = 3


class Graphs:
    """Functions of tensors and of weights, with the gradients of what they return, each recorded when first called.

    Weights may be written to in place, and must stay where they are. All graphs share memory: what one returned has to
    be used before the next one that was recorded earlier is replayed.
    """

    def __init__(self, weights):
        self.weights = list(weights)
        self.stream, self._pool, self._made = torch.cuda.Stream(self.weights[0].device), None, {}

    def __call__(self, key, function, *inputs):
        """What ``function(*inputs)`` returns: a loss, and maybe other tensors, without their history.

        key: by which the function is known, and the shapes of its inputs: with the same key it is not called again.
        What a replay draws follows torch's generator, as in a call; recording draws, too. The gradients of the loss
        join those of the weights; where these hold some, they have to be the very tensors that were there when the
        function was recorded.
        """
        if key not in self._made:
            self._made[key] = self._recorded(function, inputs)
        graph, held, found, gradients = self._made[key]
        for own, given in zip(held, inputs, strict=True):
            own.copy_(given)
        graph.replay()
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        return found

    def _recorded(self, function, inputs):
        """``(graph, inputs, outputs, gradients)``, the tensors being those that the graph reads and writes."""
        held, before = [x.clone() for x in inputs], [x.grad for x in self.weights]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                self._cleared()
                function(*held)[0].backward()
        self._cleared()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            found = function(*held)
            found[0].backward()
            own = [x.grad for x in self.weights]
            for kept, gradient in zip(before, own, strict=True):
                if kept is not None and gradient is not None:
                    kept.add_(gradient)
        torch.cuda.current_stream().wait_stream(self.stream)
        self._pool = self._pool or graph.pool()
        gradients = [gradient if kept is None else kept for kept, gradient in zip(before, own, strict=True)]
        return graph, held, tuple(x.detach() for x in found), gradients

    def _cleared(self):
        for weight in self.weights:
            weight.grad = None
