"""Model names of the published artifact (github.com/KLab-AI3/ipdps-26_vit), which the command of stage T1 accepts."""

# ASSUME: the artifact names a model without variant, size and stage. Its own scripts run the smallest variants at 224
# pixels; stage 1 is the sparse stage with the most tokens. Its README and its folders spell two names differently.
MODELS = {
    "VisionLongformer": "vil-tiny-224-s1",
    "RegionViT": "regionvit-tiny-224-s1",
    "RegionVit": "regionvit-tiny-224-s1",
    "DynamicViT": "dynamicvit-s-224",
    "DynamicVit": "dynamicvit-s-224",
}


def workload(name: str) -> str:
    """The workload that a published model name stands for; every other name stands for itself."""
    return MODELS.get(name, name)
