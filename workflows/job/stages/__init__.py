"""The processes of a job: factories that `transferqueue.workflows.job.graph` names."""
