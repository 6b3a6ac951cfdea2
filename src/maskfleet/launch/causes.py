"""Causes of failed runs: the pattern that shows each in a log, what it means, what to do next.

The first cause whose pattern matches wins, so the order matters: what kills a rank comes before what its death does to
the others, and a named reason before a bare signal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why runs fail."""

    name: str
    pattern: re.Pattern[str]
    meaning: str
    next_step: str


def cause(name: str, pattern: str, meaning: str, next_step: str) -> Cause:
    """A cause with its pattern compiled; ^ and $ match at line ends."""
    return Cause(name, re.compile(pattern, re.MULTILINE), meaning, next_step)


CAUSES: tuple[Cause, ...] = (
    cause(
        "gpu memory",
        r"CUDA out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
        r"|NCCL.*[Oo]ut of memory",
        "The GPU ran out of memory.",
        "lower train.images_per_gpu or model.max_size_px, or use train.precision=bf16",
    ),
    cause(
        "shared memory",
        r"insufficient shared memory|unable to (?:open|write to|allocate|mmap).*shared memory"
        r"|No space left on device.*(?:/dev/shm|/torch_)|Bus error|exitcode\s*: -7\b|[Ss]ignal 7 \(SIGBUS\)|SIGBUS",
        "Shared memory is full: the data workers hand batches over in /dev/shm.",
        "enlarge /dev/shm (docker: --shm-size=8g), or lower data.num_workers",
    ),
    cause(
        "host memory",
        r"[Oo]ut of memory: Kill|oom-kill|oom_reaper|OOMKilled|^.*\bMemoryError\b|can't allocate memory"
        r"|Cannot allocate memory|std::bad_alloc|Unable to allocate .* for an array",
        "The machine ran out of memory.",
        "lower data.num_workers, use fewer ranks per machine, or take a machine with more memory",
    ),
    cause(
        "disk full",
        r"No space left on device|Disk quota exceeded|ENOSPC|no room left on the disk|the disk (?:is full|has no room)",
        "A disk is full, most likely the one of the run directory.",
        "free disk space (old runs and checkpoints), or launch with a run directory on another disk: the run resumes "
        "from its last complete checkpoint",
    ),
    cause(
        "gpu broken",
        r"uncorrectable ECC|fallen off the bus|NVRM: Xid.*: (?:48|63|64|74|79|94|95)\b|CUDA error: ECC"
        r"|Unable to determine the device handle for [Gg][Pp][Uu]",
        "A GPU of this machine is broken.",
        "take the machine out of the hosts, reset the GPU or replace the instance, then launch again",
    ),
    cause(
        "gpu driver",
        r"CUDA driver version is insufficient|driver/library version mismatch|NVIDIA driver on your system is too old"
        r"|no kernel image is available|forward compatibility was attempted|system not yet initialized.*802",
        "Driver, CUDA and torch of this machine do not fit together.",
        "run `maskfleet doctor` there; install a newer driver, or a torch built for this one",
    ),
    cause(
        "gpu missing",
        r"on this machine, which has \d+ GPUs|No CUDA GPUs are available|invalid device ordinal"
        r"|CUDA-capable device\(s\) is/are busy",
        "There are fewer usable GPUs than ranks.",
        "start at most one rank per idle GPU of a machine (slots in the hosts file); `nvidia-smi` shows who uses them",
    ),
    cause(
        "gpu code",
        r"illegal memory access|device-side assert|unspecified launch failure|misaligned address",
        "A GPU kernel failed.",
        "check the data with `maskfleet data inspect` (labels out of range cause this), then run again with "
        "CUDA_LAUNCH_BLOCKING=1 to see the line; if the failure follows one machine, suspect its GPU",
    ),
    cause(
        "port in use",
        r"EADDRINUSE|[Aa]ddress already in use",
        "The port of the rendezvous is taken, perhaps by an earlier run that is still stopping.",
        "wait a minute and launch again, or choose another rendezvous_port; `ss -ltnp` shows who has it",
    ),
    cause(
        "run directory in use",
        r"another process is training in",
        "Another run trains in the same run directory.",
        "follow that one with `maskfleet logs`, cancel it, or launch with another --name",
    ),
    cause(
        "run directory not shared",
        r"the ranks see different checkpoints|is not shared between the hosts",
        "The hosts do not see the same run directory.",
        "put run_root on a folder that all hosts mount (EFS, FSx, NFS); `maskfleet doctor --on ssh` checks it",
    ),
    cause(
        "checkpoint damaged",
        r"checkpoints in .* are damaged|the checkpoint belongs to another model",
        "The run cannot resume from its checkpoints.",
        "restore them from a backup, or launch with another --name to start over",
    ),
    cause(
        "not a number",
        r"\b(?:loss|losses|total_cost|gradients?)\b.*(?:is|are|became) (?:nan|NaN|inf|not finite|not a number)"
        r"|total_cost: (?:nan|inf)|Loss is NaN|not finite|not a finite number",
        "The loss is no longer a number.",
        "lower train.base_lr or lengthen train.warmup_steps, set train.gradient_clip, and run `maskfleet data inspect`",
    ),
    cause(
        "bad config",
        r"there is no field|holds another run|say the same thing in two units|: it should be |recipe .* is made for"
        r"|there is no recipe|pydantic_core\._pydantic_core\.ValidationError|error: .*\bmodel\.|error: .*\btrain\.",
        "The run file is wrong.",
        "fix the named field; `maskfleet config explain FIELD` says what it takes",
    ),
    cause(
        "weights",
        r"error: there are no weights"
        r"|error: .*(?:weights|\.npz|\.safetensors|\.pth).*(?:not|no |cannot|missing|lacks|does not)",
        "The weights to start from are missing or do not fit the model.",
        "check train.weights and model.backbone.weights with `maskfleet weights inspect FILE`",
    ),
    cause(
        "missing data",
        r"error: .*(?:images?|annotation|data\.root|train2017|val2017|data|folder).*"
        r"(?:not in|do(?:es)? not exist|not there|\bis no\b|\bare no\b|missing|cannot be found|cannot read|not found)"
        r"|FileNotFoundError: .*\.(?:jpe?g|png|json)|error: there is no (?!field).*",
        "Images or annotations are not where the run file says.",
        "stage the data to data.root on every host; `maskfleet data inspect` says what is missing",
    ),
    cause(
        "bad data",
        r"error: .*(?:annotation|category|categories|bbox|polygon|segmentation|JSON|image).*",
        "The annotations or images are broken.",
        "`maskfleet data inspect` lists every fault with its image",
    ),
    cause(
        "data worker died",
        r"DataLoader worker .* (?:is killed|exited)"
        r"|a data worker (?:died|ended)|data workers? .* (?:died|killed|ended)",
        "A data worker process died, most often because memory ran out.",
        "lower data.num_workers, enlarge memory or /dev/shm; data.num_workers=0 shows the worker's own error",
    ),
    cause(
        "nccl timeout",
        r"Watchdog caught collective operation timeout|NCCL operations have failed or timed out"
        r"|ProcessGroupNCCL.*[Tt]imeout|NCCL communicator was aborted",
        "The ranks waited for each other until NCCL gave up: one of them hangs, has died or is much slower.",
        "look for the rank missing from the message; `maskfleet doctor --on ssh` checks the network between hosts",
    ),
    cause(
        "nccl network",
        r"nccl(?:System|Remote|Internal|Unhandled(?:System|Cuda))?Error|NCCL WARN (?:NET|Net|socket|Connect|Call to)"
        r"|No socket interface found|libfabric.*(?:failed|error)|NET/OFI.*(?:failed|error)",
        "NCCL cannot talk to the other GPUs or hosts.",
        "name the network card (NCCL_SOCKET_IFNAME), open all TCP ports between the hosts, and see NCCL_DEBUG=INFO",
    ),
    cause(
        "host key",
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key is not trusted",
        "A host's key is unknown or has changed.",
        "log in once by `ssh HOST` to check it; for a host that was recreated, `ssh-keygen -R HOST` first",
    ),
    cause(
        "login refused",
        r"Permission denied \((?:publickey|password|keyboard)|Too many authentication failures",
        "A host does not accept the key.",
        "add your public key to ~/.ssh/authorized_keys there; `ssh -v HOST` shows what was tried",
    ),
    cause(
        "host unreachable",
        r"No route to host|Name or service not known|Temporary failure in name resolution|Could not resolve hostname"
        r"|Network is unreachable|[Hh]ost is down|is lost: no sign of life|Connection timed out"
        r"|kex_exchange_identification",
        "A host cannot be reached.",
        "check that it is up and its name resolves; the run continues if it comes back while restarts are left",
    ),
    cause(
        "mpi slots",
        r"not enough slots available",
        "mpirun found fewer slots than ranks.",
        "give each host its slots in the hosts file, such as `host1 slots=8`",
    ),
    cause(
        "mpi start",
        r"ORTE was unable to reliably start|ORTE daemon has unexpectedly failed|PRTE|unable to launch the specified"
        r"|mpirun was unable to",
        "mpirun could not start its helpers on every host.",
        "each host must reach each other by SSH without a password, and have the same Open MPI",
    ),
    cause(
        "rendezvous",
        r"RendezvousTimeoutError|RendezvousConnectionError|RendezvousClosedError|waiting for clients"
        r"|client socket has timed out|DistStoreError|have no rendezvous address",
        "The ranks did not find each other in time.",
        "open the rendezvous port and all TCP ports between the hosts; see whether all hosts were up",
    ),
    cause(
        "version mismatch",
        r"ModuleNotFoundError|ImportError|undefined symbol|No module named|needs Python|version `GLIBC"
        r"|unrecognized arguments|SyntaxError",
        "The hosts have different or missing versions of Python, torch or maskfleet.",
        "launch without `environment`, so that each host gets this version, or make the environments equal; "
        "`maskfleet doctor --on ssh` compares them",
    ),
    cause(
        "file system",
        r"Stale file handle|Transport endpoint is not connected|Input/output error|Read-only file system"
        r"|Too many open files",
        "A file system failed under the run.",
        "see whether the shared folder is still mounted on every host (`maskfleet doctor --on ssh`), then launch again",
    ),
    cause(
        "no permission",
        r"Permission denied|Operation not permitted|EACCES",
        "The run lacks permission to read or write a file.",
        "give the user of the run access to the path in the message",
    ),
    cause(
        "stopped",
        r"stopped by SIG(?:TERM|INT) after step|exitcode\s*: (?:-15|143)\b|received (?:signal )?(?:SIGTERM|15)"
        r"|Received .*(?:death signal|SIGTERM)|rebalance recommendation|[Ss]pot .*interruption",
        "The run was asked to stop: by `cancel`, by a machine going down, or by a spot instance being taken back.",
        "launch it again: it resumes from the checkpoint saved when it stopped",
    ),
    cause(
        "crash",
        r"Segmentation fault|exitcode\s*: -(?:11|6|4|8)\b|SIGSEGV|SIGABRT|SIGILL|core dumped",
        "A rank crashed outside Python.",
        "compare versions and drivers with `maskfleet doctor`; run again with PYTHONFAULTHANDLER=1 to see where",
    ),
    cause(
        "killed",
        r"exitcode\s*: -9\b|SIGKILL|[Ss]ignal 9 \(Killed\)|exited on signal 9|ended with code 137",
        "A rank was killed from outside, most often by the kernel because the machine ran out of memory.",
        "look at `dmesg -T | grep -i oom` on that host; lower data.num_workers or take a machine with more memory",
    ),
    cause(
        "lost rank",
        r"lost another rank|Connection (?:closed|reset) by peer|Broken pipe",
        "Another rank ended; this one only noticed.",
        "look at the first rank that failed: `maskfleet logs HANDLE --rank N`",
    ),
)
