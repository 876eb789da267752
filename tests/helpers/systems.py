"""Small systems whose every configuration can be tried."""

import itertools

from tilewright.configure import replay, system


def pwm():
    """A pulse: high while a counter is below ``duty``; the counter runs to ``period``."""
    make = system.Builder("pwm")
    period, duty = make.parameter("period", 4), make.parameter("duty", 4)
    count = make.state("count", 4)
    make.next(count, count.equals(period).choose(make.const(0, 4), count + 1))
    make.output("high", count.below(duty))
    return make.system


def generator():
    """Two loops and a schedule of four bits: it fires where the cycle is the start and what the loops have added."""
    make = system.Builder("generator")
    names = ("last0", 2), ("last1", 2), ("start", 3), ("step0", 2), ("step1", 3)
    last0, last1, start, step0, step1 = (make.parameter(*each) for each in names)
    cycle, total = make.state("cycle", 4), make.state("sum", 4)
    one, other, done = make.state("one", 2), make.state("other", 2), make.state("done", 1)

    def wide(word, bits):
        return make.apply("concat", make.const(0, bits), word)

    fire = ~done & cycle.equals(total + wide(start, 1))
    end0, end1 = one.equals(last0), other.equals(last1)
    step = end0.choose(end1.choose(make.const(0, 4), wide(step1, 1)), wide(step0, 2))
    make.next(cycle, cycle + 1)
    make.next(total, fire.choose(total + step, total))
    make.next(one, fire.choose(end0.choose(make.const(0, 2), one + 1), one))
    make.next(other, (fire & end0).choose(end1.choose(make.const(0, 2), other + 1), other))
    make.next(done, done | (fire & end0 & end1))
    make.output("fire", fire)
    return make.system


def fifo():
    """Two words deep: ``put`` and ``take`` are inputs; it asks for more below one threshold, and warns from another."""
    make = system.Builder("fifo")
    low, high = make.parameter("low", 2), make.parameter("high", 2)
    put, take, data = make.input("put", 1), make.input("take", 1), make.input("data", 3)
    first, second, count = make.state("first", 3), make.state("second", 3), make.state("count", 2)
    none, full = count.equals(0), count.equals(2)
    takes, puts = take & ~none, put & ~full
    shifted = takes.choose(second, first)
    left = takes.choose(count - 1, count)
    make.next(first, (puts & left.equals(0)).choose(data, shifted))
    make.next(second, (puts & left.equals(1)).choose(data, second))
    make.next(count, puts.choose(left + 1, left))
    make.output("out", first)
    make.output("hungry", count.below(low))
    make.output("warns", ~count.below(high))
    return make.system


def configurations(of):
    """Every configuration of a system, a dict each."""
    names = list(of.configuration)
    for values in itertools.product(*(range(1 << of.width(name)) for name in names)):
        yield dict(zip(names, values, strict=True))


def gives(of, example, registers):
    """Whether a configuration gives an example."""
    names = [*example.outputs, *example.pins]
    return example.broken(replay.run(of, registers, example.inputs, example.cycles, names)) is None
