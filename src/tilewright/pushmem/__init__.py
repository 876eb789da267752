"""Push memories: they stream data by themselves, once their loops, addresses and schedules are set.

`memories` holds the tiles, a family; `settings` their configurations, `configuration_file` the file of one;
`recurrence` how a controller steps; `streams` what goes in and comes out, cycle by cycle; `fit` the algebra that finds
loops; `templates` the schedules inside of a tile, from what goes in and comes out; `counting` why there are none.
`solve` puts them together. `dsl` is the language of programs, `mapping` compiles them, `simulate` and `netlist` run
them. `configure` finds the configuration of any system.

Words: a *controller* decides in which cycles a port of the tile moves a word, and from or to which address. It *fires*
in these cycles. A *wide word* is what the memory moves at once, `fetch` words.
"""
