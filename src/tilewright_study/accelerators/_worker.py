"""The cost model's own process: reads what is asked on standard input, and writes costs to standard output.

``python -m tilewright_study.accelerators._worker FOLDER``; the model's own files go to FOLDER, its words to standard
error.
"""

import json
import os
import sys
from pathlib import Path

# By kind of shape, over the vector, the lanes and the elements: which loops run side by side. A depthwise kernel sums
# up no channels: its own nine numbers take the vector's place, as far as they fit.
_SPREAD = {"product": (["C"], "K", "B"), "depthwise": (["FX", "FY"], "G", "OX")}
_LINKS = {"O": "O", "W": "I2", "I": "I1"}
_PRECISION = {"W": 8, "I": 8, "O": 24, "O_final": 8}


def layer(shape, number):
    """A shape as `zigzag` reads layers, the `number`-th of them."""
    pixels, inputs, outputs = shape["pixels"], shape["inputs"], shape["outputs"]
    common = {"id": number, "name": f"layer{number}", "operand_precision": _PRECISION, "operand_source": {}}
    if shape["kind"] == "product":
        return common | {
            "operator_type": "Gemm",
            "equation": "O[b][k]+=W[k][c]*I[b][c]",
            "loop_dims": ["B", "K", "C"],
            "loop_sizes": [pixels, outputs, inputs],
        }
    side, rows, columns = round(inputs**0.5), *rectangle(pixels)
    return common | {
        "operator_type": "Conv",
        "equation": "O[b][g][k][oy][ox]+=W[g][k][c][fy][fx]*I[b][g][c][iy][ix]",
        "dimension_relations": ["ix=1*ox+1*fx", "iy=1*oy+1*fy"],
        "loop_dims": ["B", "G", "K", "C", "OY", "OX", "FY", "FX"],
        "loop_sizes": [1, outputs, 1, 1, rows, columns, side, side],
        "pr_loop_dims": ["IX", "IY"],
        "pr_loop_sizes": [columns, rows],
        "padding": [[side // 2] * 2] * 2,
    }


def rectangle(pixels):
    """Rows and columns of a map of so many pixels, as square as they divide, rows at most columns."""
    rows = next(rows for rows in range(int(pixels**0.5), 0, -1) if pixels % rows == 0)
    return rows, pixels // rows


def mapping(kind, sizes):
    """How loops of a `kind` of shape are spread over an array of `sizes`, as `zigzag` reads it."""
    first, *others = _SPREAD[kind]
    spread = {
        f"D{place}": [f"{loop}, {size}"] for place, (loop, size) in enumerate(zip(others, sizes[1:], strict=True), 2)
    }
    if kind == "product":
        spread["D1"] = [f"{first[0]}, {sizes[0]}"]
    else:
        taps = first if sizes[0] >= 9 else first[:1]
        spread["D1"] = [f"{loop}, 3" for loop in taps]
    return [{"name": "default", "spatial_mapping": spread, "memory_operand_links": _LINKS}]


def main(folder):
    """See the module."""
    asked, folder = json.load(sys.stdin), Path(folder)
    # What the model and its bars print must not stand among the costs.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import logging

    logging.basicConfig(level=logging.WARNING)
    import yaml

    hardware = folder / "hardware.yaml"
    hardware.write_text(yaml.safe_dump(asked["hardware"], sort_keys=False))
    found = {}
    for kind in dict.fromkeys(shape["kind"] for shape in asked["shapes"]):
        spread = folder / f"{kind}.yaml"
        spread.write_text(yaml.safe_dump(mapping(kind, asked["sizes"]), sort_keys=False))
        places = [place for place, shape in enumerate(asked["shapes"]) if shape["kind"] == kind]
        layers = [layer(asked["shapes"][place], number) for number, place in enumerate(places)]
        found |= zip(places, _costs(layers, hardware, spread, asked["orders"]), strict=True)
    found = [found[place] for place in range(len(asked["shapes"]))]
    json.dump(found, answer)
    answer.close()


def _costs(layers, hardware, spread, orders):
    """``[(cycles, pJ), …]`` of `layers`, each mapped so that cycles times energy is least."""
    from zigzag.mapping.temporal_mapping import TemporalMappingType
    from zigzag.stages.evaluation.cost_model_evaluation import CostModelStage
    from zigzag.stages.main import MainStage
    from zigzag.stages.mapping.spatial_mapping_generation import SpatialMappingGeneratorStage
    from zigzag.stages.mapping.temporal_mapping_generator_stage import TemporalMappingGeneratorStage
    from zigzag.stages.parser.accelerator_parser import AcceleratorParserStage
    from zigzag.stages.parser.workload_parser import WorkloadParserStage
    from zigzag.stages.results.reduce_stages import MinimalEDPStage, SumStage
    from zigzag.stages.workload_iterator import WorkloadStage

    # Those of its own `api`, but for the pictures and files that it leaves of each layer.
    stages = [WorkloadParserStage, AcceleratorParserStage, SumStage, WorkloadStage, MinimalEDPStage]
    stages += [SpatialMappingGeneratorStage, MinimalEDPStage, TemporalMappingGeneratorStage, CostModelStage]
    main_stage = MainStage(
        list_of_callables=stages,
        accelerator=str(hardware),
        workload=layers,
        mapping=str(spread),
        loma_lpf_limit=orders,
        loma_show_progress_bar=False,
        nb_mappings_generated=3,
        enable_mix_spatial_mapping_generation=False,
        access_same_data_considered_as_no_access=True,
        temporal_mapping_type=TemporalMappingType.UNEVEN,
    )
    ((_, each),) = main_stage.run()
    return [(float(cost.latency_total2), float(cost.energy_total)) for cost, _ in each]


if __name__ == "__main__":
    main(sys.argv[1])
