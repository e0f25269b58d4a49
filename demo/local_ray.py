"""A Ray of this machine's own for a demo, a benchmark or tests, with Ray Serve on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from demo.server import free_port

__all__ = ["local_ray", "runs_actor"]

NUM_CPUS = 2
OBJECT_STORE_BYTES = 100 << 20


@contextmanager
def local_ray(serve_log_level: str = "INFO") -> Iterator[str]:
    """The address of Ray Serve's proxy. Ray is ended on the way out, and its processes with it."""
    # Ray reads variables when it is imported, and callers set some.
    import ray
    from ray import serve

    port = free_port()
    ray.init(
        num_cpus=NUM_CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": serve_log_level})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def runs_actor(command: Sequence[str], actor: str) -> bool:
    """Whether a process with this command line is that of `actor`, such as "ServeReplica:application:deployment"."""
    # while an actor carries a method out, its name is behind the actor's
    return any(title == f"ray::{actor}" or title.startswith(f"ray::{actor}.") for title in command[:1])
