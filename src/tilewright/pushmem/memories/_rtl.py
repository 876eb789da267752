"""Tiles and their controllers in Amaranth. Every register of the configuration is an input of the tile, which must not
change while it runs: a system for `configure`, and one shared library for all configurations."""

from collections.abc import Mapping

from tilewright.core.errors import Unavailable, install
from tilewright.pushmem.memories import Parameters
from tilewright.pushmem.settings import CYCLE, CYCLE_BITS

try:
    from amaranth.hdl import Array, Cat, Const, Elaboratable, Module, Mux, Signal
    from amaranth.lib.memory import Memory
except ImportError as error:
    raise Unavailable(f"RTL needs amaranth: {install()} ({error})") from error

# Of a loop's counter: extents of 65,536 are the largest.
LOOP_BITS = 16
# Controllers of each part.
KINDS = {"agg": ("in2agg", "agg2sram"), "sram": ("agg2sram", "sram2tb"), "tb": ("sram2tb", "tb2out")}


class Controller(Elaboratable):
    """Loops, a schedule and addresses that step together, see `recurrence`.

    configuration: ``{register: Signal}``, inputs. fire: of this cycle. values: ``{address: Signal}``. run: an input,
    whether this cycle counts. cycle: the counter, an input.
    """

    def __init__(self, name: str, addresses: Mapping[str, int], levels: int):
        self.name, self.levels, self.widths = name, levels, {CYCLE: CYCLE_BITS, **addresses}
        self.configuration = {f"{name}_enable": Signal(name=f"{name}_enable")}
        for level in range(levels):
            self._register(f"last{level}", LOOP_BITS)
        for what, bits in self.widths.items():
            self._register(f"{what}_start", bits)
            for level in range(levels):
                self._register(f"{what}_step{level}", bits)
        self.run, self.cycle = Signal(), Signal(CYCLE_BITS)
        self.fire = Signal(name=f"{name}_fire")
        self.values = {what: Signal(bits, name=f"{name}_{what}") for what, bits in self.widths.items()}

    def _register(self, name, bits):
        self.configuration[f"{self.name}_{name}"] = Signal(bits, name=f"{self.name}_{name}")

    def _stated(self, name):
        return self.configuration[f"{self.name}_{name}"]

    def elaborate(self, _platform: object) -> Module:
        m = Module()
        done = Signal(name=f"{self.name}_done")
        counts = [Signal(LOOP_BITS, name=f"{self.name}_count{level}") for level in range(self.levels)]
        sums = {what: Signal(bits, name=f"{self.name}_{what}_sum") for what, bits in self.widths.items()}
        for what, value in self.values.items():
            m.d.comb += value.eq(self._stated(f"{what}_start") + sums[what])
        m.d.comb += self.fire.eq(self.run & self._stated("enable") & ~done & (self.cycle == self.values[CYCLE]))
        ends = [count == self._stated(f"last{level}") for level, count in enumerate(counts)]
        with m.If(self.fire):
            lower = Const(1)
            steps = {what: Const(0, bits) for what, bits in self.widths.items()}
            for level, (count, end) in enumerate(zip(counts, ends, strict=True)):
                with m.If(lower):
                    m.d.sync += count.eq(Mux(end, 0, count + 1))
                for what in steps:
                    steps[what] = Mux(lower & ~end, self._stated(f"{what}_step{level}"), steps[what])
                lower = lower & end
            for what, step in steps.items():
                m.d.sync += sums[what].eq(sums[what] + step)
            with m.If(lower):
                m.d.sync += done.eq(1)
        return m


class _Tile(Elaboratable):
    """What tiles share. ports: all inputs and outputs, in order; `run` stops the tile where it is 0."""

    def __init__(self, parameters, kinds=None):
        self.parameters = parameters
        self.run = Signal(name="run")
        self.data_in = [Signal(parameters.bits, name=f"data_in{port}") for port in range(parameters.inputs)]
        self.data_out = [Signal(parameters.bits, name=f"data_out{port}") for port in range(parameters.outputs)]
        self.valid_out = [Signal(name=f"valid_out{port}") for port in range(parameters.outputs)]
        self.controllers = {
            name: Controller(name, port.addresses, parameters.levels)
            for name, port in parameters.ports().items()
            if kinds is None or port.kind in kinds
        }
        self.told = []
        # Only a tile of a chain has these.
        self.chain_in = [Signal(parameters.bits, name=f"chain_in{port}") for port in range(parameters.outputs)]
        self.chain_in = self.chain_in if parameters.chain else []
        self.chain = {name: Signal(parameters.chain, name=name) for name in ("chain_index", "chain_mask")}
        self.chain = self.chain if parameters.chain else {}

    @property
    def configuration(self):
        """``{register: Signal}`` of all controllers, and of the place in a chain."""
        stated = {name: signal for each in self.controllers.values() for name, signal in each.configuration.items()}
        return stated | self.chain

    @property
    def ports(self):
        """Inputs and outputs."""
        fires = [each.fire for each in self.controllers.values()]
        stated = self.configuration.values()
        return [self.run, *self.data_in, *self.chain_in, *stated, *self.data_out, *self.valid_out, *fires, *self.told]

    def _here(self, controller):
        """Whether a controller fires at this tile's memory."""
        return controller.fire & self._mine(controller) if self.chain else controller.fire

    def _mine(self, controller):
        """Whether a controller's address is of this tile."""
        number = controller.values["sram"][-self.parameters.chain :]
        return (number & self.chain["chain_mask"]) == self.chain["chain_index"]

    def _place(self, controller):
        """A controller's address within this tile."""
        address = controller.values["sram"]
        return address[: len(address) - self.parameters.chain] if self.chain else address

    def _started(self):
        m = Module()
        cycle = Signal(CYCLE_BITS, name="cycle")
        with m.If(self.run):
            m.d.sync += cycle.eq(cycle + 1)
        for name, each in self.controllers.items():
            m.submodules[name] = each
            m.d.comb += [each.run.eq(self.run), each.cycle.eq(cycle)]
        return m


class _Wide(_Tile):
    """Aggregators, memory and transpose buffers, or one of these parts: what it does not have is an input."""

    def __init__(self, parameters, part):
        self.parts = ("agg", "sram", "tb") if part == "top" else (part,)
        super().__init__(parameters, [kind for each in self.parts for kind in KINDS[each]])
        words = parameters.fetch * parameters.bits
        self.rows = [Signal(words, name=f"row{port}") for port in range(parameters.inputs)]
        self.register = Signal(words, name="register")
        if "agg" not in self.parts:
            self.data_in = self.rows if part == "sram" else [self.register]
        if "tb" not in self.parts:
            self.data_out, self.valid_out = [], []
        given = {id(signal) for signal in self.data_in}
        told = [*(self.rows if set(self.parts) & {"agg", "sram"} else ()), *([] if part == "agg" else [self.register])]
        self.told = [signal for signal in told if id(signal) not in given]

    def elaborate(self, _platform: object) -> Module:
        m = self._started()
        for part in self.parts:
            getattr(self, f"_{part}")(m, self.parameters, self.controllers)
        return m

    def _agg(self, m, p, at):
        for port, data in enumerate(self.data_in):
            taken, given = at[f"in2agg{port}"], at[f"agg2sram{port}"]
            words = [Signal(p.bits, name=f"agg{port}_{word}") for word in range(p.rows * p.fetch)]
            for place, word in enumerate(words):
                with m.If(taken.fire & (taken.values["agg"] == place)):
                    m.d.sync += word.eq(data)
            rows = Array(Cat(words[row * p.fetch : (row + 1) * p.fetch]) for row in range(p.rows))
            m.d.comb += self.rows[port].eq(rows[given.values["agg_row"]])

    def _sram(self, m, p, at):
        m.submodules.sram = memory = Memory(shape=p.fetch * p.bits, depth=p.depth, init=[])
        write, read = memory.write_port(), memory.read_port()
        m.d.comb += read.en.eq(0)
        # The last assignment wins: reads before writes, port 1 before 0.
        for port in reversed(range(p.outputs)):
            fetched = at[f"sram2tb{port}"]
            with m.If(self._here(fetched)):
                m.d.comb += [read.addr.eq(self._place(fetched)), read.en.eq(1)]
        for port in reversed(range(p.inputs)):
            given = at[f"agg2sram{port}"]
            with m.If(self._here(given)):
                m.d.comb += [write.addr.eq(self._place(given)), write.data.eq(self.rows[port])]
                m.d.comb += [write.en.eq(1), read.en.eq(0)]
        m.d.comb += self.register.eq(read.data)

    def _tb(self, m, p, at):
        for port in range(p.outputs):
            fetched, given = at[f"sram2tb{port}"], at[f"tb2out{port}"]
            due, row = Signal(name=f"due{port}"), Signal(p.widths["tb_row"], name=f"due_row{port}")
            with m.If(self.run):
                m.d.sync += [due.eq(fetched.fire), row.eq(fetched.values["tb_row"])]
            words = [Signal(p.bits, name=f"tb{port}_{word}") for word in range(p.tb_rows * p.fetch)]
            for place, word in enumerate(words):
                with m.If(self.run & due & (row == place // p.fetch)):
                    m.d.sync += word.eq(self.register.word_select(place % p.fetch, p.bits))
            shown = Array(words)[given.values["tb"]]
            if self.chain:
                # Of each row, whether its wide word is this tile's: it came when the word came.
                own, here = Signal(p.tb_rows, name=f"own{port}"), Signal(name=f"due_own{port}")
                with m.If(self.run):
                    m.d.sync += here.eq(self._mine(fetched))
                with m.If(self.run & due):
                    m.d.sync += own.bit_select(row, 1).eq(here)
                turn = given.values["tb"][(p.fetch - 1).bit_length() :]
                shown = Mux(own.bit_select(turn, 1), shown, self.chain_in[port])
            m.d.comb += [self.valid_out[port].eq(given.fire), self.data_out[port].eq(Mux(given.fire, shown, 0))]


class _DualPort(_Tile):
    def elaborate(self, _platform: object) -> Module:
        m, p, at = self._started(), self.parameters, self.controllers
        memory = Memory(shape=p.bits, depth=p.depth, init=[])
        m.submodules.sram = memory
        write, read = memory.write_port(), memory.read_port()
        taken, given, valid = at["in2sram0"], at["sram2out0"], Signal(name="valid")
        m.d.comb += [write.addr.eq(self._place(taken)), write.data.eq(self.data_in[0])]
        m.d.comb += [write.en.eq(self._here(taken)), read.addr.eq(self._place(given)), read.en.eq(given.fire)]
        with m.If(self.run):
            m.d.sync += valid.eq(given.fire)
        shown = read.data
        if self.chain:
            own = Signal(name="own")
            with m.If(self.run):
                m.d.sync += own.eq(self._mine(given))
            shown = Mux(own, shown, self.chain_in[0])
        m.d.comb += [self.valid_out[0].eq(valid & self.run), self.data_out[0].eq(Mux(valid & self.run, shown, 0))]
        return m


def wide_tile(parameters: Parameters, part: str = "top") -> Elaboratable:
    """A tile as `pub`, or a part of it."""
    return _Wide(parameters, part)


def dual_port_tile(parameters: Parameters) -> Elaboratable:
    """A tile as `dp`."""
    return _DualPort(parameters)


class Alone(Elaboratable):
    """A controller without addresses, and the counter of cycles: what its schedule follows from."""

    def __init__(self, name: str, levels: int):
        self.controller = Controller(name, {}, levels)
        self.configuration = self.controller.configuration
        self.ports = [*self.configuration.values(), self.controller.fire]

    def elaborate(self, _platform: object) -> Module:
        m, cycle = Module(), Signal(CYCLE_BITS, name="cycle")
        m.d.sync += cycle.eq(cycle + 1)
        m.submodules[self.controller.name] = self.controller
        m.d.comb += [self.controller.run.eq(1), self.controller.cycle.eq(cycle)]
        return m
