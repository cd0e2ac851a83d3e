"""Trains a language model on a TPU pod slice, and unchanged on one TPU or on a laptop.

    python examples/train_on_pod.py                                             # a tiny model, here
    python examples/train_on_pod.py --preset 1b --compile-only v5e:16x16        # what a pod would make of it
    python examples/train_on_pod.py --preset 1b --checkpoints gs://bucket/run   # the same command on every host

The model (`language_model.py`) has 0.1 million to 1 billion parameters. Its residual adds are tiledops' gates and its
optimizer is tiledops' AdamW in one pass. It computes in bfloat16 on a mesh with the Explicit axes data, fsdp and
tensor. The parts are in `pod/`, one role a file.

Stopped at any moment, the same command goes on from the last good checkpoint, on any mesh, and on the same mesh with
the same losses to the last bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import jax
from console import at_least, what_runs
from pod import RunError, account, data, loop, parallel
from pod.checkpoints import Checkpoints, hush
from pod.log import Log, say
from pod.presets import PRESETS, Settings

import tiledops
from tiledops import compiled


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny")
    add("--batch", type=int, help="windows of text a step, over all devices; default: the preset's")
    add("--context", type=int, help="bytes in a window; default: the preset's")
    add("--steps", type=int, default=100)
    add("--learning-rate", type=float, help="the highest; default: the preset's")
    add("--drop", type=float, default=0.0, help="how often a branch is dropped (stochastic depth)")
    add("--seed", type=int, default=0)
    add("--data", type=folder, help="folder of files to train on; default: the source of Python's standard library")
    add("--mesh", type=mesh_shape, metavar="D,F,T", help="devices along data, fsdp and tensor; default: fsdp up to 16")
    add("--mode", choices=("tpu", "simulate", "reference"), help="default: tpu on a TPU, else reference, plain jnp")
    add("--out", type=folder, default=Path("runs/pod"), help="folder for the first host's metrics, and traces")
    add("--checkpoints", type=filled, help="folder that every host sees; default: OUT/checkpoints")
    add("--save-every", type=int, default=50, help="steps from one checkpoint to the next")
    add("--keep", type=int, default=3, help="checkpoints to keep")
    add("--patience", type=int, default=5, help="stop after so many steps in a row that are not finite")
    add("--profile", action="store_true", help="write a trace of three steps, or of those left, into OUT/profile")
    add("--compile-only", type=filled, metavar="TOPOLOGY", help="compile the step for an absent TPU, such as v5e:16x16")
    add("--coordinator", type=address, help="host:port of process 0, where no pod provides it")
    add("--num-processes", type=int)
    add("--process-id", type=int)
    return parser


def mesh_shape(text: str) -> tuple[int, int, int]:
    shape = tuple(int(number) if number.isdecimal() else 0 for number in text.split(","))
    if len(shape) != 3 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"must be three numbers of 1 or more, as 2,4,1; got {text!r}")
    return shape


def filled(text: str) -> str:
    if not text:  # a variable of the shell that is not set
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def folder(text: str) -> Path:
    return Path(filled(text))


def address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"must be host:port, as 10.0.0.2:1234; got {text!r}")
    return text


def settings_of(args: argparse.Namespace, text: data.Text) -> Settings:
    preset = PRESETS[args.preset]
    chosen = Settings(
        preset=args.preset,
        batch=args.batch or preset.batch,
        context=args.context or preset.context,
        steps=args.steps,
        learning_rate=args.learning_rate or preset.learning_rate,
        drop=args.drop,
        seed=args.seed,
        text_bytes=len(text),
    )
    if len(text) <= chosen.context:
        raise RunError(f"--context {chosen.context} must be less than the text, of {len(text)} bytes")
    return chosen


def join(args: argparse.Namespace) -> None:
    """Joins the other hosts' processes, if there are any: by the flags, else as a pod provides."""
    given = (args.coordinator, args.num_processes, args.process_id)
    if any(value is not None for value in given):
        if any(value is None for value in given):
            raise RunError("--coordinator, --num-processes and --process-id go together")
        jax.distributed.initialize(*given)
        return
    try:
        jax.distributed.initialize()
    except ValueError as error:  # no environment that JAX knows: one process by itself
        if "coordinator_address" not in str(error):
            raise


def check_alike(args: argparse.Namespace, settings: Settings) -> None:
    """Raises RunError if the hosts were started differently: they would wait for each other, or train a mix."""
    own = ("coordinator", "process_id", "out", "data")  # of the data, its size is in the settings
    given = {name: value for name, value in vars(args).items() if name not in own}
    if other := parallel.different(given | dataclasses.asdict(settings) | {"checkpoints": checkpoints_of(args)}):
        raise RunError(f"not all hosts have the same {', '.join(other)}: start the same command on each")


def checkpoints_of(args: argparse.Namespace) -> str:
    return args.checkpoints or str(args.out / "checkpoints")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    least = dict.fromkeys(("context", "steps", "save_every", "keep", "patience", "num_processes"), 1)
    at_least(parser, args, least | {"batch": 2, "seed": 0})  # an axis of 1 has no sharding in its type
    if not 0 <= args.drop < 1:
        parser.error(f"--drop must be from 0 to less than 1; got {args.drop}")
    if args.learning_rate is not None and not 0 < args.learning_rate < 2.0**127:
        parser.error(f"--learning-rate must be more than 0, and a float32; got {args.learning_rate}")
    if args.compile_only and args.mode == "simulate":
        parser.error("--mode simulate runs on this machine alone, and compiles for no TPU; take tpu or reference")
    for name in ("seed", "steps"):
        if getattr(args, name) >= 2**31:
            parser.error(f"--{name} must be less than 2**31; got {getattr(args, name)}")


def run(args: argparse.Namespace) -> bool:
    try:
        text = data.Text.of(args.data)
    except OSError as error:
        raise RunError(f"--data {args.data} cannot be read: {error.strerror}") from error
    settings = settings_of(args, text)
    try:
        if args.compile_only:
            mesh = parallel.make_mesh(compiled.topology_devices(args.compile_only), args.mesh)
        else:
            join(args)
            check_alike(args, settings)
            mesh = parallel.make_mesh(jax.devices(), args.mesh)
        parallel.check_fits(settings, mesh)
    except (ValueError, RuntimeError) as error:  # the latter: no libtpu to compile with, no coordinator to join
        raise RunError(str(error)) from error
    say(f"preset {args.preset}: {settings.batch} windows of {settings.context} bytes a step; mesh {dict(mesh.shape)}")
    mode = args.mode or ("tpu" if account.on_tpu(mesh) else "reference")
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode) as config:
        try:
            runs = what_runs(config)
        except (RuntimeError, ValueError) as error:  # a mode that cannot run here, or an environment that names no chip
            raise RunError(str(error)) from error
        if args.compile_only:
            for line in account.compile_only(settings, mesh).lines(settings.batch * settings.context):
                say(line)
            return True
        say(runs)
        log = Log(args.out)
        plan = loop.Plan(args.save_every, args.patience, args.profile)
        checkpoints = Checkpoints(checkpoints_of(args), args.keep, say)
        try:
            finished = loop.run(settings, mesh, text, checkpoints, log, plan)
        finally:
            checkpoints.close()  # what was begun is written, whatever ends the run
        say(f"metrics: {log.path}; checkpoints: {checkpoints.folder}")
    return finished


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    check(parser, args)
    hush()
    try:
        return 0 if run(args) else 143  # 128 + SIGTERM: not done, start me again
    except RunError as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    sys.exit(main())
