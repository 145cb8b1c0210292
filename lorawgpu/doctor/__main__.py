"""`lorawgpu doctor`: check the drivers, and every kernel against its reference on this device."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from lorawgpu.cli import START, add_device_option, hint, main_of, parser_of
from lorawgpu.doctor.check import Outcome, run_check
from lorawgpu.doctor.end_to_end import FAMILIES, check_decoding, check_training
from lorawgpu.doctor.environment import check_memory, machine_facts, short_limits
from lorawgpu.doctor.kernels import CHECKS
from lorawgpu.doctor.system import VENDORS, System, diagnose, inspect_system, install_advice
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.gpu import KernelCache, open_device
from lorawgpu.gpu.device import list_adapters

COLUMNS = "{:<19}{:<34}{:>9}{:>9}{:>7}  {}"


def checks(device) -> Iterator[Outcome]:
    """All checks, the quick ones first."""
    kernels = KernelCache(device)
    yield check_memory(device)
    for check in CHECKS:
        yield run_check(device, kernels, check)
    for family in FAMILIES:
        yield from check_training(device, kernels, family)
        yield check_decoding(device, kernels, family)


def until_lost(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """The outcomes up to one that lost the device: no later check could run."""
    for outcome in outcomes:
        yield outcome
        if "is lost" in outcome.fault:
            return


def verdict(outcome: Outcome) -> str:
    if outcome.ok:
        return "ok"
    if outcome.fault:
        return f"FAILED: {outcome.fault}"
    return f"WRONG in {outcome.worst or 'the result'}"


def line_of(outcome: Outcome) -> str:
    error = "-" if outcome.error is None else f"{outcome.error:.1e}"
    seconds = f"{outcome.seconds:.1f}s"
    return COLUMNS.format(outcome.kernel, outcome.shape, error, f"{outcome.tolerance:.0e}", seconds, verdict(outcome))


def print_facts(facts: dict, chosen: str) -> None:
    print("  ".join(f"{name} {version or '-'}" for name, version in facts["versions"].items()))
    print(f"system: {facts['system']}")
    for key in ("cards", "card_memory"):
        for text in facts[key]:
            print(f"{key.replace('_', ' ')}: {text}")
    for i, adapter in enumerate(facts["adapters"]):
        limits = adapter["limits"]
        print(
            f"adapter {i}: {adapter['name']} ({adapter['type']}, {adapter['backend']}), driver {adapter['driver']}\n"
            f"  binding {limits['max-storage-buffer-binding-size'] >> 20} MiB, "
            f"buffer {limits['max-buffer-size'] >> 20} MiB, "
            f"workgroup memory {limits['max-compute-workgroup-storage-size'] >> 10} KiB, "
            f"{limits['max-compute-invocations-per-workgroup']} invocations; {', '.join(adapter['features'])}"
        )
    print(f"checked: {chosen}")


def advice(failed: list[Outcome], device, system: System) -> str:
    """The message for failed checks: what is wrong and what to do."""
    kernels = ", ".join(dict.fromkeys(outcome.suspects for outcome in failed))
    return "\n  ".join(
        [
            f"{len(failed)} checks failed on {device.name}, driver {device.driver}: {kernels}",
            "do not train on this device: its results are wrong",
            f"update the driver: {install_advice(system, VENDORS.get(device.info['vendor_id']))}",
            "try another device with --device, and attach the output of `lorawgpu doctor --json` to a bug report",
        ]
    )


def run(argv: list[str]):
    parser = parser_of("doctor")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, for a bug report")
    add_device_option(parser)
    args = parser.parse_args(argv)
    began, system, adapters = time.perf_counter(), inspect_system(), list_adapters()
    facts = machine_facts(system, adapters)
    findings = diagnose(system, adapters) + [text for adapter in facts["adapters"] for text in short_limits(adapter)]
    if not adapters:
        if args.json:
            print(json.dumps(facts | {"findings": findings, "checks": [], "ok": False}))
        raise UserError("no GPU adapter found\n  " + "\n  ".join(findings))
    device = open_device(args.device)
    if not args.json:
        print_facts(facts, f"{device.name}: {device.reason}")
        print(f"matrix cores: {device.matrix_note}")
        for finding in findings:
            print(f"note: {finding}")
        print(COLUMNS.format("kernel", "sizes", "error", "allowed", "time", ""))
    outcomes = []
    for outcome in until_lost(checks(device)):
        outcomes.append(outcome)
        if not args.json:
            print(line_of(outcome), flush=True)
    failed, seconds = [o for o in outcomes if not o.ok], round(time.perf_counter() - began, 1)
    if args.json:
        rows = [asdict(o) | {"ok": o.ok} for o in outcomes]
        report = {
            "findings": findings,
            "device": device.name,
            "matrix_cores": device.matrix_note,
            "checks": rows,
            "seconds": seconds,
            "ok": not failed,
        }
        print(json.dumps(facts | report))
    else:
        print(f"{len(outcomes)} checks, {len(failed)} failed, {seconds} s")
    if failed:
        raise CheckFailed(advice(failed, device, system))
    hint(START)


main = main_of(run)

if __name__ == "__main__":
    sys.exit(main())
