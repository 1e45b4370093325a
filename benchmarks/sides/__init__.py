"""One module per way to distribute the job: how it is started, grown, shrunk and ended."""
