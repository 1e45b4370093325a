"""One file for each way to distribute the job: how it is started, grown, shrunk and ended."""
