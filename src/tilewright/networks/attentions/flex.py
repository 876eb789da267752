"""FlexAttention, compiled, in the form that is fastest at a site, with the bias as its ``score_mod``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright.networks import attention_sites
from tilewright.networks.attentions import tilewright
from tilewright.torch_attention import flex

if TYPE_CHECKING:
    import torch

TRACED = "operator"

# Tokens enter plan order once a stage, as for a plan.
order = tilewright.order


def prepare(
    site: attention_sites.Site, bias: "torch.Tensor | None", dtype: "torch.dtype", device: "torch.device"
) -> Callable:
    """The first call with tokens of a shape compiles and times all forms of `torch_attention.flex`, once a site.

    Raises what these raise.
    """
    own = None
    index: Any = site.bias_index
    if bias is not None:
        # The tables of bias indices go to the device now: compiled code cannot bring them there.
        at = attention_sites.resident(site, "order", device)
        index(at[:1], at[:1])
        own = flex.Bias(bias.to(device, dtype), lambda rows, cols: index(at[rows], at[cols]))
    made = {}

    def form(variant):
        if variant not in made:
            setting = {"dtype": dtype, "device": device.type, "variant": variant, "bias": own}
            made[variant] = flex.prepare(site.ordered, max_bytes=1 << 32, **setting)
        return made[variant]

    def run(q, k, v):
        key = "flex", dtype, device, q.shape
        if key not in site.plans:
            site.plans[key] = flex.fastest(form, flex.UNTUNED, q, k, v)
            # Layers need no more than their own form.
            made.clear()
        return form(site.plans[key]).call(q, k, v)

    return run
