"""Systems configured from an example of what goes in and comes out, by satisfiability modulo theories.

A `system.System` is a state machine over words: inputs, states, outputs, and a configuration C that does not change.
`query.solve` looks for a C with which it gives the example's outputs: since inputs and outputs are known, and a run is
determined by them and C, no quantifier over runs is needed. Of all C the one is taken that is least by `objectives`,
layer by layer. Every answer is run by the interpreter (`replay`) before it is returned; where there is none, `explain`
names a least set of outputs that no C gives. `design` configures any design in BTOR2.

After "Automating System Configuration" (FMCAD 2021). Nothing here knows a memory.
"""
