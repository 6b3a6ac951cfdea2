"""`maskfleet sagemaker`: the programs that SageMaker starts in a container."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from maskfleet.cli.console import err

app = typer.Typer(help="The programs that SageMaker starts in a container.", no_args_is_help=True)

# Absolute, because the ranks run in another folder.
RootOption = Annotated[
    Path, typer.Option("--root", resolve_path=True, help="Folder through which SageMaker and the container talk.")
]


@app.command("train")
def train(
    root: RootOption = Path("/opt/ml"),
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of this host. Default: one per GPU, or one without.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port at which ranks of several hosts meet.")] = 29500,
) -> None:
    """Train as the job in /opt/ml says; SageMaker runs this as `train` on every host."""
    from maskfleet.launch.sagemaker.container.train import train as run
    from maskfleet.launch.sagemaker.container.tree import Tree

    gpus = None
    if ranks is None:
        import torch

        gpus = torch.cuda.device_count()
        ranks = max(1, gpus)
    raise typer.Exit(run(Tree(root), ranks, gpus=gpus, port=port))


@app.command("serve")
def serve(
    root: RootOption = Path("/opt/ml"),
    host: Annotated[
        str, typer.Option(help="Address to listen on. SageMaker needs 0.0.0.0 inside its container.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="SAGEMAKER_BIND_TO_PORT", help="Port to listen on.")
    ] = 8080,
    step: Annotated[
        int | None,
        typer.Option(
            min=0,
            envvar="MASKFLEET_STEP",
            help="Step of the checkpoint. Default: the best one, or else the newest.",
            show_default=False,
        ),
    ] = None,
    score: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            envvar="MASKFLEET_SCORE",
            help="Lowest score in answers, unless a request has its own. Default: that of the run's reports.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer /ping and /invocations with the model in /opt/ml/model; SageMaker runs this as `serve`."""
    from maskfleet.data.pipeline.build import eval_batch_size
    from maskfleet.inference.load import load, weights_in
    from maskfleet.serve.app import App
    from maskfleet.serve.batching import DetectionQueue
    from maskfleet.serve.detection import DetectionService
    from maskfleet.serve.server import AppServer, serve_until_stopped

    detector = load(weights_in(root / "model", step), checkpoint=step)
    batch_size = eval_batch_size("auto", detector.device)
    queue = DetectionQueue(detector, batch_size=batch_size)
    lowest = score if score is not None else detector.run.eval.show_score_threshold
    service = DetectionService(queue, source=detector.source, default_score=lowest, at_once=max(4, 2 * batch_size))
    server = AppServer(App(service.routes), host, port)
    serve_until_stopped(
        server, ready=lambda: err.print(f"{detector.source} answers on http://{host}:{server.server_port}")
    )
    queue.close()
