"""Order a graph by reverse Cuthill-McKee: the published artifact's command for `reorder.py --method rcm`.

python workflow/scripts/rcm.py --input A.npz --output A_rcm.npz
"""

from reorder import command

if __name__ == "__main__":
    command(__doc__, "rcm")
