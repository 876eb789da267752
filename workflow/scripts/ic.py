"""T2: order a graph by iterative clustering. The published artifact's command for `reorder.py --method ic`."""

from reorder import command

if __name__ == "__main__":
    command(__doc__, "ic")
