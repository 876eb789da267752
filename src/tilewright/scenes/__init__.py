"""Scenes: data made by rule, where no checkpoint and no video can be fetched.

`planted`: queries and keys whose attention maps have a known structure and density, at any size. `clips`: short videos
of moving photographs, and their latents. Each is a function of its arguments and seed alone.
"""
