"""One Terraform root module: initialise, plan, apply and read its state."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.diagnose import diagnostics_in_text, error_of
from maskfleet.infra.terraform.progress import Diagnostic, TerraformProgress, parse_event
from maskfleet.infra.terraform.state import State, parse_state
from maskfleet.infra.view import InfraView
from maskfleet.system.process import Finished, capture, stream

MINIMUM = (1, 5, 0)
MINIMUM_FOR_S3_LOCK = (1, 10, 0)
LOGS_KEPT = 30


@dataclass(frozen=True, slots=True)
class Program:
    """The terraform on this machine."""

    path: str
    version: tuple[int, ...]
    env: Mapping[str, str]
    """Makes it ask no questions and not check for newer versions."""


def find_terraform(env: Mapping[str, str]) -> Program:
    """The terraform on the PATH of `env`, if it is new enough."""
    wanted = ".".join(map(str, MINIMUM))
    path = shutil.which("terraform", path=env.get("PATH", ""))
    if path is None:
        raise InfraError("terraform is not installed here", remedy=f"install Terraform {wanted} or newer")
    env = {**env, "TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1"}
    done = capture([path, "version", "-json"], env=env, timeout_s=60)
    try:
        text = str(json.loads(done.out)["terraform_version"])
        version = tuple(int(part) for part in text.split("-")[0].split("."))
    except (ValueError, KeyError, TypeError) as error:
        raise InfraError(
            f"{path} does not print its version: {(done.err or done.out).strip()[:200]}",
            remedy=f"install Terraform {wanted} or newer",
        ) from error
    if version < MINIMUM:
        raise InfraError(f"{path} is Terraform {text}; {wanted} is needed", remedy=f"install {wanted} or newer")
    return Program(path, version, env)


@dataclass(frozen=True, slots=True)
class Root:
    """One root module in its folder; starts every terraform process that works on it."""

    name: str
    folder: Path
    logs: Path
    program: Program
    view: InfraView

    @property
    def plan_file(self) -> Path:
        """Where the last plan is saved; it may contain secrets, and only its owner may read the folder."""
        return self.logs.parent / "plans" / f"{self.name}.tfplan"

    def init(self) -> None:
        """Install providers and configure the backend."""
        # -reconfigure: our files say where the state is, and the work folder may have been moved.
        self._run(["init", "-input=false", "-no-color", "-reconfigure"], verb="prepare")

    def plan(self, *, destroy: bool = False, targets: Sequence[str] = ()) -> TerraformProgress:
        """Plan, and save the plan."""
        self.plan_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = ["-destroy"] if destroy else []
        flags += [f"-target={target}" for target in targets]
        argv = ["plan", "-json", "-input=false", "-lock-timeout=3s", f"-out={self.plan_file.resolve()}", *flags]
        return self._run(argv, verb="plan")

    def apply(self) -> TerraformProgress:
        """Apply exactly the saved plan."""
        argv = ["apply", "-json", "-input=false", "-lock-timeout=3s", str(self.plan_file.resolve())]
        progress = self._run(argv, verb="apply")
        self.plan_file.unlink(missing_ok=True)
        return progress

    def planned_values(self) -> list[dict[str, Any]]:
        """Every change of the saved plan with its values, which may be secret: do not show or store them."""
        done = self._capture(["show", "-json", str(self.plan_file.resolve())])
        changes: list[dict[str, Any]] = json.loads(done.out).get("resource_changes", [])
        return changes

    def state(self) -> State:
        """What exists according to the state; AWS is not asked."""
        return parse_state(self._capture(["state", "pull"]).out)

    def forget(self, addresses: Sequence[str]) -> None:
        """Remove `addresses` from the state; the resources themselves are not touched."""
        if addresses:
            self._capture(["state", "rm", "-lock-timeout=3s", *addresses])

    def _capture(self, arguments: Sequence[str]) -> Finished:
        done = capture([self.program.path, *arguments], cwd=self.folder, env=self.program.env, timeout_s=300)
        if done.code != 0:
            raise self._failed(arguments, diagnostics_in_text(done.err), self.logs)
        return done

    def _failed(self, arguments: Sequence[str], found: Sequence[Diagnostic], log: Path) -> InfraError:
        return error_of(found, what=f"{self.name}: terraform {arguments[0]}", folder=self.folder, log=log)

    def _run(self, arguments: Sequence[str], *, verb: str) -> TerraformProgress:
        progress = TerraformProgress()
        log = self._log(verb)

        def line(text: str) -> None:
            event = parse_event(text)
            progress.add(event, time.monotonic())
            self.view.event(event, progress)

        with self.view.watching(f"{self.name}: {verb}", progress):
            done = stream(
                [self.program.path, *arguments],
                cwd=self.folder,
                env=self.program.env,
                log=log,
                line=line,
                tick=lambda: self.view.tick(progress),
                asked_to_stop=self.view.stopping,
            )
        if done.interrupted:
            raise self._stopped(done, verb)
        if done.code != 0:
            self._check_saved()
            raise self._failed(arguments, progress.errors or diagnostics_in_text("\n".join(progress.text)), log)
        return progress

    def _stopped(self, done: Finished, verb: str) -> InfraError:
        self._check_saved()
        if done.code < 0:
            what = f"terraform was killed by signal {-done.code} while it stopped; its state may lack the last steps"
            remedy = "run the same command again; if the state is locked, the error says how to unlock it"
        else:
            end = "stopped: terraform exited cleanly" if done.code else f"stopped after {self.name}: {verb} finished"
            what = f"{end}, {'its state is saved' if verb == 'apply' else 'nothing was changed'}"
            remedy = "run the same command again to resume"
        error = InfraError(what, remedy=remedy)
        error.exit_code = 130  # that of Ctrl-C
        return error

    def _check_saved(self) -> None:
        """Raise an error if Terraform could not save its state and left errored.tfstate."""
        rescued = self.folder / "errored.tfstate"
        if rescued.exists():
            raise InfraError(
                f"terraform could not save its state in the backend and left it in {rescued}",
                remedy=f"terraform -chdir={self.folder} state push errored.tfstate, then delete that file",
            )

    def _log(self, verb: str) -> Path:
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(self.logs.glob("*.jsonl"))[: -(LOGS_KEPT - 1)]:
            old.unlink(missing_ok=True)
        return self.logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}-{self.name}-{verb}.jsonl"
