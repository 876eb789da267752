"""Where Triton's kernels are tested; the interpreter has to be asked for before a kernel is imported."""

import dataclasses
import functools
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch


def patch_language_once():
    """Have Triton's interpreter look for the members of `triton.language` that it replaces once.

    It does so before a launch, which it takes back afterwards, and in each call of a function of the kernel in between,
    which then changes nothing and takes a third of the time.
    """
    from triton import language
    from triton.runtime import interpreter

    # What is replaced now, and what else is replaced where that is.
    replace, replaced, members = interpreter._patch_lang, set(), {}

    @functools.cache
    def languages(function):
        return frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)

    def replace_once(function):
        if languages(function) in replaced:
            return interpreter._LangPatchScope()
        key = languages(function), frozenset(replaced)
        if key in members:
            scope = interpreter._LangPatchScope()
            for member in members[key]:
                scope.set_attr(*member)
        else:
            scope = replace(function)
            changed = {(id(object), name): (object, name) for object, name, _ in scope._changes}
            members[key] = [(object, name, vars(object)[name]) for object, name in changed.values()]
        replaced.add(languages(function))
        restore = scope.restore

        def restore_all():
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = replace_once


def check_no_overflow():
    """Spare the interpreter what it computes to see integers overflow: without `debug`, it does not look at it."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_types():
    """Have Triton find what it derives from a shape or a type once, and not anew for each operation on a block."""
    from triton.language import core
    from triton.runtime import interpreter

    unwrap, equal, np_dtype = core._unwrap_if_constexpr, core.tuple.__eq__, interpreter._get_np_dtype
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    plain = frozenset((int, bool, float, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor))
    blocks, np_dtypes, of_scalars = {}, {}, {}

    def unwrap_if_constexpr(x):
        return x if type(x) in plain else unwrap(x)

    def init_block_type(self, element_ty, shape):
        sizes = shape.values if type(shape) is core.tuple else unwrap_if_constexpr(shape)
        key = element_ty.name, *map(unwrap_if_constexpr, sizes)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {**vars(self), "sizes": key[1:], "of_tensors": {}}
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor_once(self, handle, type):
        block = type.is_block()
        known = type.of_tensors if block else of_scalars
        if not known:
            init_tensor(self, handle, type)
            known.update(shape=self.shape, numel=self.numel)
        vars(self).update(known, handle=handle, type=type, dtype=type.element_ty if block else type.scalar)

    def init_tuple(self, args, type=None):
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def equal_to(self, other):
        return core.constexpr(self.values == other) if type(other) is list else equal(self, other)

    def get_np_dtype(type):
        name = type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(type)
        return np_dtypes[name]

    core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrap_if_constexpr, get_np_dtype
    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor_once
    core.tuple.__init__, core.tuple.__eq__ = init_tuple, equal_to
    # Few ask for the type of a tuple.
    core.tuple.type = functools.cached_property(lambda self: core._type_for_tuple_values(self.values))
    core.tuple.type.__set_name__(core.tuple, "type")


# Operators that take the short way, as functions of numpy: those that give a value of their operands' type, and those
# that compare. Division and remainders have rules of their own.
ARITHMETIC = {"add": "add", "radd": "add", "sub": "subtract", "mul": "multiply", "rmul": "multiply"}
COMPARISONS = {
    **{"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"},
    **{"eq": "equal", "ne": "not_equal"},
}
# Types of their operands, and of an offset of pointers.
NUMBERS, OFFSETS = frozenset(("fp32", "int32", "int64")), frozenset(("int32", "int64"))
# Types that are loaded the short way, and those of what stands where nothing is loaded.
LOADED = {"fp32": (int, float), "fp16": (int, float), "bf16": (), "int32": (int,), "int64": (int,), "int8": (int,)}
INDEXED = frozenset((*LOADED, "int1"))


def shorten_calls():
    """Have functions of `triton.language` called without what only wraps them, and common operators applied at once.

    An operator whose operands are numbers of one type, or a pointer and an offset, needs none of the checks of types,
    which take twenty times as long as numpy. All others go the usual way.
    """
    from triton.language import core
    from triton.runtime import interpreter

    semantic, shapes, types, whole = interpreter.interpreter_semantic, {}, {}, slice(None)

    def made(data, dtype, type):
        handle = object.__new__(interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        return core.tensor(handle, type)

    def common(one, other, element):
        """The type of what two operands give, of values of the type `element`."""
        key = sizes(one), sizes(other)
        if key not in shapes:
            shapes[key] = np.broadcast_shapes(*key)
        return block(element, shapes[key])

    def sizes(type):
        """Of a block; a scalar has none."""
        return vars(type).get("sizes", ())

    def block(element, shape):
        """The type of a block, or of a scalar, of values of the type `element`."""
        key = element.name, shape
        if key not in types:
            types[key] = core.block_type(element, [*shape]) if shape else element
        return types[key]

    def moved(handle, offset):
        return handle.data + max(1, handle.get_element_ty().primitive_bitwidth // 8) * offset

    def operator(function, compares, usual):
        offsets = function is np.add

        def apply(self, other):
            if type(other) is core.constexpr:
                other = other.value
            kind = self.dtype.name
            if type(other) is core.tensor:
                if (kind in NUMBERS and other.dtype.name == kind) or {kind, other.dtype.name} == OFFSETS:
                    whole = self.dtype if other.dtype.name == kind else core.int64
                    element = core.int1 if compares else whole
                    same = self.type if element is self.dtype and other.type is self.type else None
                    found = same or common(self.type, other.type, element)
                    return made(function(self.handle.data, other.handle.data), element, found)
                if offsets and self.dtype.is_ptr() and other.dtype.name in OFFSETS:
                    data = moved(self.handle, other.handle.data.astype(np.uint64))
                    return made(data, self.handle.dtype, common(self.type, other.type, self.dtype))
            elif (type(other) is int and kind in NUMBERS and -(2**31) <= other < 2**31) or (
                type(other) is float and kind == "fp32" and kind in NUMBERS
            ):
                element = core.int1 if compares else self.dtype
                found = common(self.type, core.int32, element) if compares else self.type
                return made(function(self.handle.data, other), element, found)
            elif type(other) is int and offsets and self.dtype.is_ptr() and 0 <= other < 2**31:
                return made(moved(self.handle, np.uint64(other)), self.handle.dtype, self.type)
            return usual(self, other)

        return apply

    def load(usual):
        def loaded(pointer, mask=None, other=None, **options):
            element, shape = getattr(pointer.dtype, "element_ty", None), pointer.handle.data.shape
            name = getattr(element, "name", None)
            if name not in LOADED or options.keys() & {"boundary_check", "padding_option"}:
                return usual(pointer, mask, other, **options)
            if mask is None is other:
                given = np.ones(shape, bool)
            elif (
                type(mask) is core.tensor
                and mask.dtype.name == "int1"
                and common(pointer.type, mask.type, core.int1) is block(core.int1, sizes(pointer.type))
                and (other is None or (type(other) in (int, float) and (other == 0 or type(other) in LOADED[name])))
            ):
                given = np.broadcast_to(mask.handle.data, shape)
            else:
                return usual(pointer, mask, other, **options)
            dtype = interpreter._get_np_dtype(element)
            blank = np.full(shape, other or 0, dtype)
            data = interpreter._interpreter.load(pointer.handle.data, given, blank, dtype)
            return made(data, element, block(element, sizes(pointer.type)))

        return loaded

    def where(usual):
        def chosen(condition, x, y):
            tensors = [each for each in (condition, x, y) if type(each) is core.tensor]
            if len(tensors) == 3 and condition.dtype.name == "int1" and x.dtype.name == y.dtype.name in NUMBERS:
                found = common(common(x.type, y.type, x.dtype), condition.type, x.dtype)
                return made(np.where(condition.handle.data, x.handle.data, y.handle.data), x.dtype, found)
            return usual(condition, x, y)

        return chosen

    def item(usual):
        def indexed(self, slices):
            plain = type(slices) is tuple and self.type.is_block() and self.dtype.name in INDEXED
            if plain and all(each is None or each == whole for each in slices):
                data = self.handle.data[slices]
                return made(data, self.handle.dtype, block(self.dtype, data.shape))
            return usual(self, slices)

        return indexed

    shorter = {"load": load, "where": where}

    def patch_shortly(object, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def usual(*arguments, **options):
            options["_semantic"] = semantic
            return function(*arguments, **options)

        bare = name.strip("_")
        if object is core.tensor and name == f"__{bare}__" and bare in ARITHMETIC | COMPARISONS:
            numpys = getattr(np, (ARITHMETIC | COMPARISONS)[bare])
            scope.set_attr(object, name, operator(numpys, bare in COMPARISONS, usual))
        elif object is core.tensor and name == "__getitem__":
            scope.set_attr(object, name, item(usual))
        elif object is not core.tensor and name in shorter:
            scope.set_attr(object, name, shorter[name](usual))
        else:
            scope.set_attr(object, name, usual)

    interpreter._patch_attr = patch_shortly


TRITON_DEVICE = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
if TRITON_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    # Its time is that of the work around numpy, which is the same for small and for large blocks.
    patch_language_once()
    check_no_overflow()
    remember_types()
    shorten_calls()
HOPPER = TRITON_DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter, and this machine has no Hopper GPU")


def cases(*axes, times=1):
    """Cases of a test of kernels: on a GPU, all combinations of the values of `axes`.

    Under the interpreter, which takes a tenth of a second or more for each: `times` as many as the longest axis has
    values. Every value of every axis stands in one, and of two axes as many pairs of values as there is room for.
    """
    every, chosen, seen = [*itertools.product(*(range(len(axis)) for axis in axes))], [], set()

    def new(case):
        values = [*enumerate(case)]
        return [{*values} - seen, {*itertools.combinations(values, 2)} - seen]

    count = len(every) if TRITON_DEVICE == "cuda" else times * max(map(len, axes))
    while len(chosen) < min(count, len(every)):
        chosen.append(max((case for case in every if case not in chosen), key=lambda case: [*map(len, new(case))]))
        seen.update(*new(chosen[-1]))
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen]


def hide_gpu(monkeypatch):
    """Have torch find no GPU, also where there is one."""
    from tilewright import devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Without what was found earlier.
    monkeypatch.setattr(devices, "_described", devices._described.__wrapped__)
