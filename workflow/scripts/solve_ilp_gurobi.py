"""Schedule a graph with Gurobi: the published artifact's command for `solve_ilp.py --solver gurobi`."""

from solve_ilp import parser, run, script

if __name__ == "__main__":
    parser.description = __doc__
    parser.set_defaults(solver=["gurobi"])
    script(parser, run)
