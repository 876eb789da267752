"""T2: order a graph by reverse Cuthill-McKee. The published artifact's command for `reorder.py --method rcm`."""

from reorder import command

if __name__ == "__main__":
    command(__doc__, "rcm")
