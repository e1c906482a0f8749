"""`transferqueue export`: write the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferqueue.cli.screens.terminal import say
from transferqueue.observe import units

EXAMPLES = (
    ("transferqueue export runs/grpo-20260101-120000 models/mine", "its newest checkpoint, as it was trained"),
    ("transferqueue export runs/grpo-20260101-120000 models/mine --dtype bfloat16", "in half the bytes of float32"),
    ("transferqueue export runs/grpo-20260101-120000 models/mine --best", "the checkpoint that was evaluated best"),
    ("transferqueue export runs/lora-20260101-120000 models/mine --merge", "LoRA's adapters added to their base"),
)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory of the model; new or empty.", show_default=False)
    ],
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Step of the checkpoint. Default: the newest.", show_default=False),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that was evaluated best.")] = False,
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16. Default: as trained.", show_default=False),
    ] = "",
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Add LoRA's adapters to their base. Holds a base that is no safetensors whole in memory. Default: "
            "peft's format.",
        ),
    ] = False,
) -> None:
    """Write the model of a run.

    The directory has configuration, tokenizer, chat template and weights, in files of at most 5 GB. transformers and
    vLLM load it, and so does model.path of a job. A finished run has one already: RUN/model. Memory holds one tensor
    at a time, of mixtures of experts a layer.
    """
    from transferqueue.workflows.job.run.export import export_run

    written = export_run(run, out, step=step, best=best, dtype=dtype, merge=merge)
    say(f"wrote {out}: step {written.step}, {units.size(written.nbytes)} of weights")
