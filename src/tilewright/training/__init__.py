"""Recipes by which networks are trained, for weights that any machine can make again. Importing it needs no torch."""
