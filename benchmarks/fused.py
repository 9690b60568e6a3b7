"""How fast are the fused depth-wise convolution and normalisation, layer by layer of a supernet?

    python benchmarks/fused.py [--images 250] [--groups 1] [--dtype float32] [--out FILE]
    python benchmarks/fused.py --compile [--out FILE]

The layers are those of cifar10-paper's MobileNetV3 supernet at its largest. Milliseconds on CUDA of a forward pass and of a forward and
backward pass: fused, and by torch (`conv2d` with groups = channels, in both layouts; `batch_norm` and the activation). Bytes are those
that must move at least: every map read or written once a pass. Share is that of 4.3 TB/s, what an H200's memory reaches.

With --compile nothing runs: every kernel is compiled for an H200, on any machine with Triton, and its registers and spills are listed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.assemble.environment import environment
from fedloom.files import write_file
from fedloom.supernets import fused

BANDWIDTH = 4.3e12  # bytes a second
EXPANSION, KERNEL = 6, 7
STEM = (16, 32)  # channels, side
STAGES = [(24, 1), (40, 2), (80, 2), (112, 1), (160, 2)]  # channels and stride; the stride is its first block's
POINTERS = {"taps": "*fp32", "partial": "*fp32", "moments": "*fp32", "totals": "*fp32", "weight": "*fp32", "bias": "*fp32"}
POINTERS |= {"mask": "*u8", "reach": "*i64", "active": "*i64", "dw": "*fp32"}
POINTERS |= {"found": "*fp32", "sums": "*fp32", "width": "*i64", "terms": "*i64", "starts": "*i64", "index": "*i64"}
MAPS = ("x", "y", "dx", "dy", "residual", "gate", "dgate", "share", "means", "vectors", "maps")


def layers() -> Iterator[tuple[int, int, int, int]]:
    """Channels, side of the input, kernel and stride of every different depth-wise convolution."""
    inputs, side = STEM
    yield inputs, side, 3, 1  # the first block does not expand
    for outputs, stride in STAGES:
        yield inputs * EXPANSION, side, KERNEL, stride
        inputs, side = outputs, -(-side // stride)
        yield inputs * EXPANSION, side, KERNEL, 1


def milliseconds(work: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, warmup=25, rep=100, return_mode="median"))


def timed(forward: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float]:
    """Of a forward pass without gradients, and of one with."""
    upstream = torch.randn_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), leaves, upstream)

    with torch.no_grad():
        alone = milliseconds(forward)
    return alone, milliseconds(both)


def measure(channels: int, side: int, kernel: int, stride: int, images: int, groups: int, dtype: torch.dtype) -> dict[str, Any]:
    shape = (groups, images, channels, side, side)
    x = torch.randn(shape, device="cuda", dtype=dtype).movedim(2, -1).contiguous().movedim(-1, 2).requires_grad_()
    weight = torch.randn(channels, 1, kernel, kernel, device="cuda", requires_grad=True)
    scale, shift = (torch.ones(channels, device="cuda").requires_grad_() for _ in range(2))
    merged = x.detach().flatten(0, 1).requires_grad_()  # torch does as if there were one group
    dense = merged.detach().contiguous().requires_grad_()
    half = weight.detach().to(dtype).requires_grad_()

    def torch_depthwise(map: Tensor) -> Tensor:
        return F.conv2d(map, half, None, stride, kernel // 2, 1, channels)

    def torch_norm() -> Tensor:
        return F.hardswish(F.batch_norm(merged, None, None, scale, shift, True))

    rows: dict[str, tuple[float, float]] = {
        "depthwise": timed(lambda: torch.vmap(lambda x: fused.depthwise(x, weight, stride))(x), [x, weight]),
        "depthwise, torch": timed(lambda: torch_depthwise(dense), [dense, half]),
        "depthwise, torch, channels last": timed(lambda: torch_depthwise(merged), [merged, half]),
        "norm_act": timed(lambda: torch.vmap(lambda x: fused.norm_act(x, scale, shift, None, "hardswish"))(x), [x, scale, shift]),
        "norm_act, torch": timed(torch_norm, [merged, scale, shift]),
    }
    if kernel == KERNEL:  # a small subnet in the same graph: a 3x3 kernel and half of the channels
        reach, active = torch.ones(groups, device="cuda", dtype=torch.long), torch.full((groups,), channels // 2, device="cuda")
        small = torch.vmap(lambda x, r, a: fused.depthwise(x, weight, stride, 1, r, a))
        rows["depthwise, 3x3, half"] = timed(lambda: small(x, reach, active), [x, weight])
    size, result = x.numel() * x.element_size(), x.numel() * x.element_size() * (-(-side // stride) / side) ** 2
    # Forward; backward: dx from dy, dw from x and dy. Moments and result each read x; backward twice x and dy, and dx.
    least = {"depthwise": (size + result, 3 * size + 3 * result), "norm_act": (3 * size, 8 * size)}
    found = {}
    for name, (alone, both) in rows.items():
        bytes_alone, bytes_both = least[name.partition(",")[0]]
        shares = [1000 * moved / BANDWIDTH / time for moved, time in ((bytes_alone, alone), (bytes_both, both))]
        found[name] = {
            "forward_ms": alone, "both_ms": both, "forward_bytes": bytes_alone, "both_bytes": bytes_both,
            "forward_share": shares[0], "both_share": shares[1],
        }  # fmt: skip
    return found


# -- compilation ---------------------------------------------------------------------------------------------------------
def variants() -> Iterator[tuple[str, dict[str, Any], int]]:
    """Kernels, their constants and warps, as launches choose them."""
    for kernel, (stride, dilation), chosen in itertools.product((3, 5, 7), ((1, 1), (2, 1), (1, 2), (2, 2)), (False, True)):
        if dilation == 2 and (kernel == 7 or chosen):
            continue  # no space has such layers
        flags = {"K": kernel, "S": stride, "D": dilation, "HAS_REACH": chosen, "HAS_ACTIVE": chosen}
        for beside, columns in ((1, 4), (1, 16), (4, 4)):
            yield "forward_kernel", flags | {"Q": beside, "BP": columns, "BC": 32}, 4
        for columns in (4, 16):
            yield "input_gradient_kernel", flags | {"BP": columns, "BC": 32}, 4
        for beside in (1, 2):
            yield "weight_gradient_kernel", flags | {"Q": beside, "BP": 8, "BC": 32}, 8
    for kernel, chosen in itertools.product((3, 5, 7), (False, True)):
        yield "weight_total_kernel", {"K": kernel, "HAS_REACH": chosen, "HAS_ACTIVE": chosen, "BR": 64, "BC": 32}, 4
    for width, masked in itertools.product((8, 32, 128), (False, True)):
        tile = {"UNIT": 8, "HAS_MASK": masked, "BR": 4096 // width, "BC": width}
        lower = {"BR": 2048 // width}
        yield "moments_kernel", tile | lower, 4
        for act in fused.ACTIVATIONS:
            more = {"HAS_WEIGHT": True, "HAS_BIAS": True, "ACT": act}
            for gated in (False, True):
                yield "apply_kernel", tile | more | {"HAS_MOMENTS": True, "HAS_GATE": gated, "HAS_RESIDUAL": False}, 4
            yield "means_kernel", tile | more | lower | {"HAS_MOMENTS": True}, 4
            yield "gradient_sums_kernel", tile | more | lower, 4
            yield "gradient_kernel", tile | more | lower, 4
    yield "apply_kernel", tile | more | {"HAS_MOMENTS": False, "HAS_GATE": False, "HAS_RESIDUAL": True}, 4
    yield "moments_total_kernel", {"HAS_MASK": True, "BR": 256, "BC": 16}, 4
    yield "gradient_total_kernel", {"BR": 256, "BC": 16}, 4
    for rows, width in ((16, 128), (256, 8)):
        yield "gate_gradient_kernel", {"UNIT": 8, "BR": rows, "BC": width}, 4
        for shared in (False, True):
            yield "weigh_kernel", {"UNIT": 8, "HAS_SHARE": shared, "BR": rows, "BC": width}, 4
    for name, width in itertools.product(("joint_kernel", "joint_gradient_kernel"), (128, 256)):
        yield name, {"BR": 2048 // width, "BC": width}, 4
    yield "sums_kernel", {"UNIT": 8, "BLOCK": 4096}, 4
    for maximum, stride, (rows, width) in itertools.product((True, False), (1, 2), ((64, 16), (16, 64))):
        yield "pool_kernel", {"UNIT": 8, "MAXIMUM": maximum, "STRIDE": stride, "BR": rows, "BC": width}, 4
    for rectify in (True, False):
        yield "picked_kernel", {"UNIT": 8, "RECTIFY": rectify, "BLOCK": 2048}, 4


def compiled(name: str, constants: dict[str, Any], warps: int, dtype: str) -> dict[str, Any]:
    """Registers and bytes of a kernel for an H200; ``local`` and ``stack`` are where registers are spilled to."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fedloom.supernets.kernels import cells, depthwise, depthwise_gradients, gate, joint, normalisation

    kernel = next(vars(file)[name] for file in (depthwise, depthwise_gradients, gate, normalisation, joint, cells) if name in vars(file))
    pointers = {argument: dtype if argument in MAPS else POINTERS.get(argument) for argument in kernel.arg_names}
    kinds = {
        argument: "constexpr" if argument in constants else pointers[argument] or ("fp32" if argument == "eps" else "i32")
        for argument in kernel.arg_names
    }
    aligned = {(place,): [["tt.divisibility", 16]] for place, argument in enumerate(kernel.arg_names) if kinds[argument][0] == "*"}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {key: int(re.findall(rf"{key.upper()}:(\d+)", said)[0]) for key in ("reg", "stack", "local", "shared")}
    loads = sorted(set(re.findall(r"ld\.global\S*?\.((?:v\d\.)?b\d+)", made.asm["ptx"])))
    return {"kernel": name, "dtype": dtype[1:], "warps": warps, "constants": constants, "loads": loads} | usage


def compile_all() -> Iterator[dict[str, Any]]:
    """About 500 kernels; minutes."""
    for dtype, variant in itertools.product(("*fp32", "*bf16", "*fp16"), variants()):
        yield compiled(*variant, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=250)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"command": "python benchmarks/fused.py"}
    if arguments.compile:
        record |= {"command": record["command"] + " --compile", "kernels": []}
        for one in compile_all():
            record["kernels"].append(one)
            constants = " ".join(f"{key}={value}" for key, value in one["constants"].items())
            usage = f"{one['reg']:4} registers, {one['stack'] + one['local']} spilled, {one['shared']:6} shared"
            print(f"{one['kernel']:24} {one['dtype']} {usage}  {','.join(one['loads']):16} {constants}", flush=True)
    else:
        record |= {"images": arguments.images, "groups": arguments.groups, "dtype": arguments.dtype, "layers": []}
        print(f"{'channels side kernel stride':28} {'':32} forward ms  share  both ms  share")
        for channels, side, kernel, stride in layers():
            found = measure(channels, side, kernel, stride, arguments.images, arguments.groups, getattr(torch, arguments.dtype))
            record["layers"].append({"channels": channels, "side": side, "kernel": kernel, "stride": stride} | found)
            for name, row in found.items():
                times = f"{row['forward_ms']:10.3f} {row['forward_share']:6.0%} {row['both_ms']:8.3f} {row['both_share']:6.0%}"
                print(f"{channels:8} {side:4} {kernel:6} {stride:6}  {name:32} {times}", flush=True)
        record["environment"] = environment(torch.device("cuda"))
    if arguments.out:
        write_file(arguments.out, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
