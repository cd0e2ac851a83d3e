"""The parts of `train_on_pod.py`, one role a file.

presets.py      how large a model, and all else that decides a loss curve
parallel.py     the mesh, and where each array lives on it
data.py         each host's rows of each batch
training.py     the state and the step
checkpoints.py  saved, checked, restored
account.py      what the TPU compiler made of the step, and the least time that it can take
log.py          what the first host shows and keeps
loop.py         step after step
"""


class RunError(Exception):
    """What ends a run with one line, which says it."""
