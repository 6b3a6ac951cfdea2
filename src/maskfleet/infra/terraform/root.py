"""One Terraform root: initialise, plan, apply and read its state."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.diagnose import diagnostics_in_text, error_of
from maskfleet.infra.terraform.events import parse_event
from maskfleet.infra.terraform.progress import Progress
from maskfleet.infra.terraform.state import State, parse_state
from maskfleet.infra.view import View
from maskfleet.system.process import Finished, capture, stream

MINIMUM = (1, 5, 0)
MINIMUM_FOR_S3_LOCK = (1, 10, 0)
LOGS_KEPT = 30
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Program:
    """The terraform on this machine."""

    path: str
    version: tuple[int, ...]


def quiet(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a terraform that asks nobody: no questions, no look for a newer version of itself."""
    return {**env, "TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1"}


def find_terraform(env: Mapping[str, str], *, minimum: tuple[int, ...] = MINIMUM) -> Program:
    """The terraform on the PATH of `env`, if it is new enough."""
    wanted = ".".join(map(str, minimum))
    path = shutil.which("terraform", path=env.get("PATH", ""))
    if path is None:
        raise InfraError("terraform is not installed here", remedy=f"install Terraform {wanted} or newer")
    done = capture([path, "version", "-json"], env=quiet(env), timeout_s=60)
    try:
        text = str(json.loads(done.out)["terraform_version"])
        version = tuple(int(part) for part in text.split("-")[0].split("."))
    except (ValueError, KeyError, TypeError) as error:
        raise InfraError(
            f"{path} does not say its version: {(done.err or done.out).strip()[:200]}",
            remedy=f"install Terraform {wanted} or newer",
        ) from error
    if version < minimum:
        raise InfraError(f"{path} is Terraform {text}; {wanted} is needed", remedy=f"install {wanted} or newer")
    return Program(path, version)


@dataclass(frozen=True, slots=True)
class Root:
    """One root module in its folder; every terraform process is started here, from an argument list."""

    name: str
    folder: Path
    logs: Path
    program: Program
    env: Mapping[str, str]
    view: View

    @property
    def plan_file(self) -> Path:
        """Where the last plan is saved; it may hold secrets, and its folder is for its owner only."""
        return self.logs.parent / "plans" / f"{self.name}.tfplan"

    def init(self) -> None:
        """Get providers and the backend ready."""
        # Reconfigured each time: our own files say where the state is, and a work folder may have been moved.
        argv = ["init", "-input=false", "-no-color", "-reconfigure"]
        self._run(argv, what=f"{self.name}: terraform init", verb="prepare")

    def plan(self, *, destroy: bool = False, targets: Sequence[str] = ()) -> Progress:
        """Plan, and save the plan."""
        self.plan_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = ["-destroy"] if destroy else []
        flags += [f"-target={target}" for target in targets]
        argv = ["plan", "-json", "-input=false", "-lock-timeout=3s", f"-out={self.plan_file.resolve()}", *flags]
        return self._run(argv, what=f"{self.name}: terraform plan", verb="plan")

    def apply(self) -> Progress:
        """Apply the saved plan, exactly."""
        argv = ["apply", "-json", "-input=false", "-lock-timeout=3s", str(self.plan_file.resolve())]
        progress = self._run(argv, what=f"{self.name}: terraform apply", verb="apply")
        self.plan_file.unlink(missing_ok=True)
        return progress

    def planned_values(self) -> list[dict[str, Any]]:
        """Every change of the saved plan with its values, secrets among them: for this process only."""
        done = self._capture(["show", "-json", str(self.plan_file.resolve())])
        changes: list[dict[str, Any]] = json.loads(done.out).get("resource_changes", [])
        return changes

    def state(self) -> State:
        """What exists, by the state; nothing is asked of AWS."""
        return parse_state(self._capture(["state", "pull"]).out)

    def forget(self, addresses: Sequence[str]) -> None:
        """Take `addresses` out of the state; what they stand for is left as it is."""
        if addresses:
            self._capture(["state", "rm", "-lock-timeout=3s", *addresses])

    @property
    def is_initialised(self) -> bool:
        return (self.folder / ".terraform").is_dir()

    def _capture(self, arguments: Sequence[str]) -> Finished:
        done = capture([self.program.path, *arguments], cwd=self.folder, env=self._env(), timeout_s=300)
        if done.code != 0:
            found = diagnostics_in_text(ANSI.sub("", done.err))
            raise error_of(found, what=f"{self.name}: terraform {arguments[0]}", folder=self.folder, log=self.logs)
        return done

    def _run(self, arguments: Sequence[str], *, what: str, verb: str) -> Progress:
        progress = Progress()
        log = self._log(verb)

        def line(text: str) -> None:
            event = parse_event(text)
            progress.add(event, time.monotonic())
            self.view.event(event, progress)

        with self.view.watching(f"{self.name}: {verb}", progress):
            done = stream(
                [self.program.path, *arguments],
                cwd=self.folder,
                env=self._env(),
                log=log,
                line=line,
                tick=lambda: self.view.tick(progress),
                asked_to_stop=self.view.stopping,
            )
        if done.interrupted:
            raise self._stopped(done, verb)
        if done.code != 0:
            self._check_saved()
            found = progress.errors or diagnostics_in_text(ANSI.sub("", "\n".join(progress.text)))
            raise error_of(found, what=what, folder=self.folder, log=log)
        return progress

    def _stopped(self, done: Finished, verb: str) -> InfraError:
        self._check_saved()
        if done.code < 0:
            return interrupted(
                f"terraform was killed by signal {-done.code} while it stopped; its state may lack the last steps",
                remedy="run the same command again; if the state is locked, it says how to unlock it",
            )
        what = "stopped: terraform ended cleanly" if done.code else f"stopped after {self.name}: {verb} was finished"
        saved = "its state is saved" if verb == "apply" else "nothing was changed"
        return interrupted(f"{what}, {saved}", remedy="run the same command again to go on")

    def _check_saved(self) -> None:
        """Terraform leaves errored.tfstate where it could not save its state: never let that go unseen."""
        rescued = self.folder / "errored.tfstate"
        if rescued.exists():
            raise InfraError(
                f"terraform could not save its state where it belongs and left it in {rescued}",
                remedy=f"terraform -chdir={self.folder} state push errored.tfstate, then delete that file",
            )

    def _log(self, verb: str) -> Path:
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(self.logs.glob("*.jsonl"))[: -(LOGS_KEPT - 1)]:
            old.unlink(missing_ok=True)
        return self.logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}-{self.name}-{verb}.jsonl"

    def _env(self) -> dict[str, str]:
        return quiet(self.env)


def interrupted(what: str, *, remedy: str) -> InfraError:
    """The error that ends a command which the user stopped; its exit code is the one of Ctrl-C."""
    error = InfraError(what, remedy=remedy)
    error.exit_code = 130
    return error
