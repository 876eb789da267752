"""Attention by lists of single keys for groups of 128 queries, predicted on the device in each call."""

from tilewright.networks.video_attentions import _lists


class Settings(_lists.Settings, frozen=True, forbid_unknown_fields=True):
    """See `_lists.Settings`."""


Attention = _lists.Attention
