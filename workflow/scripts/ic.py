"""Order a graph by iterative clustering: the published artifact's command for `reorder.py --method ic`.

python workflow/scripts/ic.py --input A.npz --output A_ic.npz
"""

from reorder import command

if __name__ == "__main__":
    command(__doc__, "ic")
