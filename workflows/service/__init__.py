"""One service on one table: the calls of AsyncFlow (arXiv 2507.01663, section 5) and of StreamRL (arXiv 2504.15930,
section 4) by their names there.

Programs that know neither tables nor each other share a job by these calls: in threads (`Service`), in an event loop
(`AsyncService`), or over HTTP (`transferqueue serve --http`).

1. `init_engines` declares the job: its stages, their columns, and how far prompts may run ahead. Any process may call
   it at any time with the same declaration. It starts no engine.
2. `put_prompts_data` waits for room, then puts every prompt as a group of `samples` rows that share its values, or
   nothing.
3. `get_experience_data` leases rows of a stage until a deadline. `put_experience_data` gives results, by the index that
   the rows came with, and ends the lease in one commit. A worker that dies loses its rows to others, and its late
   results are refused.
4. `weight_sync_notify` announces a version: it advances the table's clock and wakes calls of `get_weights`. A version
   carries a notice, such as the path of a checkpoint, or tensors.
5. `status` counts every row that was ever put: nothing is lost silently.
6. On the two stages of `stream_engines`, `generate` puts prompts and returns the stream of their samples, and `update`
   publishes weights for the engines, which `serve` runs (`samples`).

Example:
    >>> import transferqueue as tq
    >>> from transferqueue.workflows.service import Engines, EngineStage, Service
    >>> job = Engines(stages=[EngineStage(name="reward", needs=["response"], gives=["rewards"])])
    >>> with tq.connect("embedded") as queue:
    ...     service = Service.init_engines(queue, job)
    ...     rows = service.put_prompts_data({"response": ["4", "5", "4"]})
    ...     batch, index = service.get_experience_data("reward", experience_count=1)
    ...     service.put_experience_data({"rewards": [1.0]}, index)
    ...     service.seal()
    ...     with service.create_stream_data_loader(experience_consumer_stage="reward", experience_count=1) as loader:
    ...         for batch, index in loader:
    ...             scores = [float(text == "4") for text in batch["response"].list()]
    ...             service.put_experience_data({"rewards": scores}, index)
    ...     service.status().rows_done
    3
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transferqueue.lazy import lazy_names

if TYPE_CHECKING:
    from transferqueue.workflows.service.aio import AsyncCompletionStream, AsyncExperienceStream, AsyncService
    from transferqueue.workflows.service.arguments import notice_of
    from transferqueue.workflows.service.by_length import LengthRequests
    from transferqueue.workflows.service.declaration import (
        ColumnSpec,
        Engines,
        EngineStage,
        GroupSpec,
        PacingSpec,
        RetrySpec,
    )
    from transferqueue.workflows.service.experience import ExperienceIndex
    from transferqueue.workflows.service.generators import serve
    from transferqueue.workflows.service.samples import SamplesLost, stream_engines
    from transferqueue.workflows.service.sync import CompletionStream, ExperienceStream, Service
    from transferqueue.workflows.service.trainer import JobService, JobTrainer, Trainer

__all__ = [
    "AsyncCompletionStream",
    "AsyncExperienceStream",
    "AsyncService",
    "ColumnSpec",
    "CompletionStream",
    "EngineStage",
    "Engines",
    "ExperienceIndex",
    "ExperienceStream",
    "GroupSpec",
    "JobService",
    "JobTrainer",
    "LengthRequests",
    "PacingSpec",
    "RetrySpec",
    "SamplesLost",
    "Service",
    "Trainer",
    "notice_of",
    "serve",
    "stream_engines",
]

__getattr__ = lazy_names(
    __name__,
    {
        "aio": "AsyncCompletionStream AsyncExperienceStream AsyncService",
        "arguments": "notice_of",
        "by_length": "LengthRequests",
        "declaration": "ColumnSpec Engines EngineStage GroupSpec PacingSpec RetrySpec",
        "experience": "ExperienceIndex",
        "generators": "serve",
        "samples": "SamplesLost stream_engines",
        "sync": "CompletionStream ExperienceStream Service",
        "trainer": "JobService JobTrainer Trainer",
    },
)
