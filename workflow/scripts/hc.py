"""T2: order a graph by hierarchical clustering. The published artifact's command for `reorder.py --method hc`."""

from reorder import command

if __name__ == "__main__":
    command(__doc__, "hc")
