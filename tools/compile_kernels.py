"""Compiles the kernels for cards on a machine without one: `--kernels`, `--dtypes`, `--targets`, each `all` or a list.

Triton carries the compilers of both makers. A line for each kernel, type and target: how much memory shared by a
program's threads it takes, of which every card has 64 KB; exit code 1 if one does not compile or takes more. RX 6000
(gfx1030) is not among the targets: Triton has no code for it, so those cards keep torch's kernels.
"""

import argparse
import sys
from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hivetune.train.worker.model.fast.gpu import attend, row_kernels
from hivetune.train.worker.model.fast.gpu.ops import BLOCK_THREADS, ROW_THREADS, tokens_at_once

TARGETS = {
    **{f"cuda:{number}": GPUTarget("cuda", number, 32) for number in (75, 80, 90)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx906", "gfx90a", "gfx942")},
    **{name: GPUTarget("hip", name, 32) for name in ("gfx1100", "gfx1201")},
}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
SHARED_BYTES = 64 << 10
WIDE = ("total", "w", "rstd", "x", "dx", "cos", "sin", "lse", "sums", "nll", "count", "d_up", "d_downs")
NUMBERS = ("eps", "scale", "cap", "sign")
TABLES = ("blocks", "segments", "ranges", "readers")
ATTENTION_CHANNELS = 128  # of a head, as most models have
THIN = {"RANKS": 16, "ROWS": 64, "COLUMNS": 64}
ATTENTION = {"SHARE": 2, "DIM": ATTENTION_CHANNELS, "CHANNELS": ATTENTION_CHANNELS, "CAPPED": True, "WINDOW": True}
# Kernel: (module, constants, threads of a program, pointers to numbers in the dtype of the products).
KERNELS = {
    "add_norm": (row_kernels, {"HAS_DELTA": True, "BLOCK": 1024}, ROW_THREADS, ("delta", "y")),
    "norm_backward": (row_kernels, {"HAS_Y": True, "BLOCK": 1024}, ROW_THREADS, ("dy", "y")),
    "rope": (row_kernels, {"HEAD_DIM": 128, "BLOCK": 64}, 32, ("x",)),
    "glu": (row_kernels, {"GELU": True, "BLOCK": 1024}, ROW_THREADS, ("gate_up", "h")),
    "glu_backward": (row_kernels, {"GELU": True, "BLOCK": 1024}, ROW_THREADS, ("dh", "gate_up", "dgate_up", "h")),
    "drop": (row_kernels, {"BLOCK": 1024}, ROW_THREADS, ("x", "out")),
    "cross_entropy": (row_kernels, {"CAPPED": True, "GRADIENT": True, "BLOCK": 4096}, ROW_THREADS, ("logits",)),
    "adapt": (row_kernels, THIN, BLOCK_THREADS, ("y", "up")),
    "adapt_backward": (row_kernels, THIN, BLOCK_THREADS, ("dy", "up")),
    "sum_up": (row_kernels, THIN, BLOCK_THREADS, ("dy", "s")),
    "sum_down": (row_kernels, {"RANKS": 16, "ROWS": 64, "INPUTS": 64}, BLOCK_THREADS, ("ds", "x")),
    "forward": (attend, ATTENTION, BLOCK_THREADS, ("qkv", "out")),
    "output_sums": (attend, {"DIM": 128, "CHANNELS": 128}, 32, ("dout", "out")),
    "backward_queries": (attend, ATTENTION, BLOCK_THREADS, ("qkv", "dout", "dqkv")),
    "backward_keys": (attend, ATTENTION, BLOCK_THREADS, ("qkv", "dout", "dqkv")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("kernels", "dtypes", "targets"):
        parser.add_argument(f"--{name}", default="all")
    asked = parser.parse_args()
    failed = 0
    for kernel in chosen(asked.kernels, KERNELS):
        for dtype in chosen(asked.dtypes, BYTES):
            for target in chosen(asked.targets, TARGETS):
                shared = shared_bytes(kernel, dtype, target)
                failed += shared is None or shared > SHARED_BYTES
                print(
                    kernel,
                    dtype,
                    target,
                    "does not compile" if shared is None else f"{shared} bytes shared",
                    flush=True,
                )
    sys.exit(failed > 0)


def shared_bytes(kernel: str, dtype: str, target: str) -> int | None:
    """None: it does not compile; Triton has said why on the standard error."""
    module, constants, threads, of_products = KERNELS[kernel]
    function = getattr(module, kernel)
    constants = dict(constants)
    if "KEYS" in function.arg_names:
        constants |= dict.fromkeys(("QUERIES", "KEYS"), tokens_at_once(ATTENTION_CHANNELS, BYTES[dtype]))
    types = {name: type_of(name, f"*{dtype}", constants, of_products) for name in function.arg_names}
    warps = max(1, threads // TARGETS[target].warp_size)
    source = ASTSource(function, types, constexprs=constants)
    try:
        return int(triton.compile(source, target=TARGETS[target], options={"num_warps": warps}).metadata.shared)
    except RuntimeError as error:
        print(f"{kernel} {dtype} {target}: {error}", file=sys.stderr)
        return None


def type_of(name: str, of_products: str, constants: Mapping[str, object], in_products: tuple[str, ...]) -> str:
    if name in constants:
        return "constexpr"
    if name in in_products:
        return of_products
    if name in TABLES:
        return "*i32"
    if name in ("target", "key"):
        return "*i64"
    if name in ("salt", "below"):
        return "i64"
    return "*fp32" if name in WIDE else "fp32" if name in NUMBERS else "i32"


def chosen(text: str, known: Mapping[str, object]) -> list[str]:
    return list(known) if text == "all" else text.split(",")


if __name__ == "__main__":
    main()
