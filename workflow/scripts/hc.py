"""Order a graph by hierarchical clustering: the published artifact's command for `reorder.py --method hc`.

python workflow/scripts/hc.py --input A.npz --output A_hc.npz
"""

from reorder import command

if __name__ == "__main__":
    command(__doc__, "hc")
