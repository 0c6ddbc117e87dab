"""What a proof came to: findings beside those of the knowledge, lines for people, plain values for JSON. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from hivetune.machine.doctor.backends import Judged
from hivetune.machine.doctor.findings import Judgement, MachineFinding, worst_first
from hivetune.machine.doctor.prove import ProvenDevice

_SAYS = {
    "wrong": "computes wrong numbers",
    "crashed": "ends the process",
    "hung": "does not answer",
    "unavailable": "could not be proven",
}


def with_proof(judgement: Judgement, proven: Sequence[ProvenDevice]) -> Judgement:
    """The judgement with what was proven wrong; what could not be asked is not known."""
    found = [finding for device in proven for finding in _findings(device)]
    right = [device for device in proven if device.proof is not None and device.proof.dtype is not None]
    if not right and proven:
        found.append(_nothing_works(proven))
    questions = [
        f"{each.of.name}: {each.why}" for device in proven for each in device.judged if each.status == "unavailable"
    ]
    return Judgement(worst_first((*judgement.findings, *found)), (*judgement.not_known, *questions))


def _findings(device: ProvenDevice) -> Iterable[MachineFinding]:
    if device.proof is None:
        yield MachineFinding(
            f"no-proof-{device.device}",
            "risk",
            f"{device.device} can't be used by torch",
            device.rates_why,
            (),
            "" if device.device == "cpu" else "hivetune train CONFIG --set device=cpu",
            about=device.device,
        )
        return
    for each in device.judged:
        if each.status in ("wrong", "crashed", "hung"):
            yield _rejected(device, each)


def _rejected(device: ProvenDevice, each: Judged) -> MachineFinding:
    """A set that is not right. It is a note where another one of its precision is: the profile avoids it then."""
    assert device.proof is not None
    instead = device.proof.best.get(each.of.dtype)
    usual = device.proof.dtype
    if instead is not None:
        says = f"{each.why}. plan and train take another set of backends in {each.of.dtype} from now on"
        mend = ""
    elif usual is not None:
        says = f"{each.why}. No set of backends in {each.of.dtype} is right here; dtype: auto takes {usual}"
        mend = f"hivetune train CONFIG --set dtype={usual}"
    else:
        says, mend = f"{each.why}. No set of backends is right on {device.device}", ""
        if device.device != "cpu":
            mend = "hivetune train CONFIG --set device=cpu"
    return MachineFinding(
        id=f"proof-{each.of.name}",
        severity="note" if instead is not None else "risk",
        title=f"{each.of.name} {_SAYS[each.status]}",
        says=says,
        evidence=(f"{each.calls:,} calls",) if each.calls else (),
        mend=mend,
        unknown="whether the card, its driver or a library is to blame" if device.device != "cpu" else "",
        about=device.device,
    )


def _nothing_works(proven: Sequence[ProvenDevice]) -> MachineFinding:
    asked = ", ".join(device.device for device in proven)
    why = next((device.rates_why for device in proven if device.rates_why), "each set of backends failed its proof")
    unasked = all(each.status == "unavailable" for device in proven for each in device.judged)
    return MachineFinding(
        "nothing-computes-right",
        "risk" if unasked else "fatal",
        "nothing could be proven" if unasked else "no device of this machine computes right",
        f"{asked}: {why}",
        (),
        "",
        unknown="whether memory, processor or the installed torch is to blame",
    )


def proof_as_text(proven: Sequence[ProvenDevice]) -> str:
    """A line for each rate and each set, in the form of the report's other lines."""
    lines = []
    for device in proven:
        lines += [f"{'rates':<13} {device.device}: {_rates(device)}"] if device.gemm else []
        lines += [f"{'proof':<13} {_judged(each)}" for each in device.judged]
        if device.proof is not None and device.proof.dtype is not None:
            winner = device.proof.best[device.proof.dtype]
            changed = ", ".join(f"{name} {value}" for name, value in {**winner.choices, **winner.environment}.items())
            lines.append(
                f"{'profile':<13} {device.device}: {device.proof.dtype}{f' ({changed})' if changed else ''}, "
                f"proven at {device.proof.job}"
            )
    return "\n".join(lines)


def proof_document(proven: Sequence[ProvenDevice]) -> list[dict[str, Any]]:
    """For `doctor --json`: each device with its rates, its sets and the winner."""
    return [
        {
            "device": device.device,
            "dtype": device.proof.dtype if device.proof else None,
            "job": device.proof.job if device.proof else None,
            "why": device.rates_why,
            "flops_per_s": dict(device.gemm),
            "rates": dict(device.other),
            "products": {dtype: dict(rates) for dtype, rates in device.products.items()},
            "sets": [
                {
                    "name": each.of.name,
                    "status": each.status,
                    "why": each.why,
                    "calls": each.calls,
                    "step_s": each.step_s,
                }
                for each in device.judged
            ],
        }
        for device in proven
    ]


def _rates(device: ProvenDevice) -> str:
    parts = [f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in device.gemm.items()]
    units = {"bandwidth": "memory", "to_device": "to the card", "from_device": "from the card"}
    parts += [f"{words} {device.other[name] / 1e9:.1f} GB/s" for name, words in units.items() if name in device.other]
    parts += [f"a launch {1e6 * device.other['launch_s']:.1f} us"] if "launch_s" in device.other else []
    return ", ".join(parts)


def _judged(each: Judged) -> str:
    if each.is_right:
        return f"{each.of.name}: right in {each.calls:,} calls, parts of a step {each.step_s:.3g} s"
    return f"{each.of.name}: {each.status}, {each.why}"
