"""Recipes by which networks are trained here, for weights that any machine can make again.

Importing it needs no torch.
"""

# Recipes of `segmentation`, and those that go on from the weights of another.
RECIPES = ("plain", "sampled", "continued", "depthless")
STARTS = {"sampled": "plain", "continued": "plain"}
# Those of networks that run whole: what paths are compared with.
STATIC = ("plain", "continued")
