"""The MLP of routed experts: rows sorted by expert, one product a group, forward and backward by hand.

The router's softmax says how much each of the K chosen experts of a row counts (Mixtral, arXiv 2401.04088; Qwen 3). Its
weights are frozen, but its input is not, so a gradient passes through it. A row's share of an expert is multiplied into
the expert's inner activation h, because the down projection is linear. Then all products are those of ops.py, on a
slice of rows, and the gradient of the share is dh . h.

How many rows an expert gets is known after the router only: on a GPU each layer waits for that.

Shapes as at the head of layer.py, and E experts, K experts a row, n = S * K rows sorted by expert, F an expert's width.
"""

import torch
from torch import Tensor

from hivetune.train.worker.model.fast.ops import Drop, down_gradient, input_gradient, project
from hivetune.train.worker.model.fast.spec import Routing
from hivetune.train.worker.model.fast.state import Dispatch, SavedMlp, Walk
from hivetune.train.worker.model.fast.weights.matrices import ExpertMlps
from hivetune.train.worker.model.memory import wide_of


def experts_forward(walk: Walk, mlp: ExpertMlps, y_SD: Tensor, slot: str, drop: Drop | None) -> tuple[Tensor, SavedMlp]:
    """Return the sum of each row's experts, [S, D], and the input of backward."""
    gate_up, down, ops = mlp.gate_up.groups, mlp.down.groups, walk.ops
    route = _route(walk, mlp, y_SD)
    drop_n = None if drop is None else drop.of(route.row_n)
    n = len(route.row_n)
    x_nD = torch.index_select(y_SD, 0, route.row_n, out=walk.buffer("sent", n, y_SD.shape[1]))
    gate_up_nW = walk.buffer(f"gate_up.{slot}", n, gate_up[0].width)
    for expert, rows in route.segments():
        project(ops, gate_up[expert], x_nD[rows], gate_up_nW[rows], _of(drop_n, rows), adapter=walk.adapter)
    h_nF = walk.buffer("h", n, down[0].inputs)
    ops.glu(gate_up_nW[:, : gate_up[0].outputs], h_nF, walk.spec.activation)
    h_nF *= route.weight_n[:, None]
    down_nW = walk.buffer("down_sent", n, down[0].width)
    for expert, rows in route.segments():
        project(ops, down[expert], h_nF[rows], down_nW[rows], _of(drop_n, rows), adapter=walk.adapter)
    s_down_nR = walk.buffer(f"s_down.{slot}", n, down[0].width - down[0].outputs)
    s_down_nR.copy_(down_nW[:, down[0].outputs :])
    down_SD = walk.buffer("down", len(y_SD), down[0].outputs)
    _gather(walk, down_nW[:, : down[0].outputs], route, down_SD)
    return down_SD, SavedMlp(gate_up_nW, s_down_nR, route)


def experts_backward(
    walk: Walk, mlp: ExpertMlps, saved: SavedMlp, ddown_SD: Tensor, dy_SD: Tensor, drop: Drop | None
) -> Tensor:
    """Write the gradient of the input rows into `dy_SD`; add dB of both tensors and dA of the second.

    Returns [dgate | dup | dS], which `experts_down_gradient` reads once the input rows are there again.
    """
    route, gate_up, down, ops = _route_of(saved), mlp.gate_up.groups, mlp.down.groups, walk.ops
    n, drop_n = len(route.row_n), None if drop is None else drop.of(route.row_n)
    ddown_nW = walk.buffer("ddown_sent", n, down[0].width)
    ddown_nW[:, : down[0].outputs] = ddown_SD[route.row_n]
    dh_nF, h_nF = walk.buffer("dh", n, down[0].inputs), walk.buffer("h", n, down[0].inputs)
    for expert, rows in route.segments():
        part = down[expert]
        ops.adapt_backward(ddown_nW[rows], part)
        ops.up_gradient(ddown_nW[rows], saved.s_down_SR[rows], part, walk.up_scale)
        input_gradient(ops, part, ddown_nW[rows], dh_nF[rows], _of(drop_n, rows))
    dgate_up_nW = walk.buffer("dgate_up", n, gate_up[0].width)
    dweighted_nF = walk.buffer("dh_weighted", n, down[0].inputs)
    torch.mul(dh_nF, route.weight_n[:, None], out=dweighted_nF)
    pair = slice(0, gate_up[0].outputs)
    ops.glu_backward(dweighted_nF, saved.gate_up_SW[:, pair], dgate_up_nW[:, pair], h_nF, walk.spec.activation)
    dweight_n = (dh_nF.to(route.weight_n.dtype) * h_nF).sum(1)
    h_nF *= route.weight_n[:, None]
    dx_nD = walk.buffer("sent", n, ddown_SD.shape[1])
    for expert, rows in route.segments():
        down_gradient(ops, down[expert], ddown_nW[rows], h_nF[rows], walk.scale, _of(drop_n, rows))
        part = gate_up[expert]
        ops.adapt_backward(dgate_up_nW[rows], part)
        ops.up_gradient(dgate_up_nW[rows], saved.gate_up_SW[rows, part.outputs :], part, walk.up_scale)
        input_gradient(ops, part, dgate_up_nW[rows], dx_nD[rows], _of(drop_n, rows))
    mlp.gate_up.collect()
    mlp.down.collect()
    _gather(walk, dx_nD, route, dy_SD)
    dy_SD += _router_gradient(walk, route, dweight_n).to(dy_SD.dtype) @ mlp.router_ED
    return dgate_up_nW


def experts_down_gradient(
    walk: Walk, mlp: ExpertMlps, saved: SavedMlp, dgate_up_nW: Tensor, y_SD: Tensor, drop: Drop | None
) -> None:
    """Add dA of the first tensor, from the recomputed input rows."""
    route = _route_of(saved)
    drop_n = None if drop is None else drop.of(route.row_n)
    x_nD = torch.index_select(y_SD, 0, route.row_n, out=walk.buffer("sent", len(route.row_n), y_SD.shape[1]))
    for expert, rows in route.segments():
        part = mlp.gate_up.groups[expert]
        down_gradient(walk.ops, part, dgate_up_nW[rows], x_nD[rows], walk.scale, _of(drop_n, rows))


def _route(walk: Walk, mlp: ExpertMlps, y_SD: Tensor) -> Dispatch:
    """Route rows by a softmax over all experts: wide, of logits in the model's own dtype, as it was trained."""
    routing = _routing(walk)
    share_SE = torch.softmax(y_SD @ mlp.router_ED.t(), 1, dtype=wide_of(walk.dtype))
    weight_SK, index_SK = torch.topk(share_SE, routing.active, 1)
    if routing.normalised:
        weight_SK = weight_SK / weight_SK.sum(1, keepdim=True)
    expert_n = index_SK.flatten()
    order_n = torch.argsort(expert_n, stable=True)
    return Dispatch(
        counts=torch.bincount(expert_n, minlength=routing.experts).tolist(),
        row_n=order_n // routing.active,
        place_n=torch.empty_like(order_n).scatter_(0, order_n, torch.arange(len(order_n), device=order_n.device)),
        weight_n=weight_SK.flatten()[order_n],
        share_SE=share_SE,
        index_SK=index_SK,
    )


def _router_gradient(walk: Walk, route: Dispatch, dweight_n: Tensor) -> Tensor:
    """Return the gradient [S, E] of the router's logits from that of the weights."""
    dweight_SK = dweight_n[route.place_n].view(route.index_SK.shape)
    chosen_SK = route.share_SE.gather(1, route.index_SK)
    if _routing(walk).normalised:
        sum_S1 = chosen_SK.sum(1, keepdim=True)
        dweight_SK = (dweight_SK - (dweight_SK * chosen_SK).sum(1, keepdim=True) / sum_S1) / sum_S1
    dshare_SE = torch.zeros_like(route.share_SE).scatter_(1, route.index_SK, dweight_SK)
    return route.share_SE * (dshare_SE - (dshare_SE * route.share_SE).sum(1, keepdim=True))


def _gather(walk: Walk, x_nD: Tensor, route: Dispatch, out_SD: Tensor) -> None:
    """Write the sum of the K rows of each row, always in the same order."""
    back_nD = torch.index_select(x_nD, 0, route.place_n, out=walk.buffer("back", *x_nD.shape))
    out_SD.copy_(back_nD.view(len(out_SD), -1, x_nD.shape[1]).sum(1, dtype=wide_of(walk.dtype)))


def _of(drop: Drop | None, rows: slice) -> Drop | None:
    return None if drop is None else drop.of(rows)


def _route_of(saved: SavedMlp) -> Dispatch:
    assert saved.route is not None
    return saved.route


def _routing(walk: Walk) -> Routing:
    assert walk.spec.routing is not None
    return walk.spec.routing
