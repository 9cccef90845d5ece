"""One point of JAX on the CPU (XLA), as one JSON line; runs in an environment with jax.

A step is one jitted function: forward, cross-entropy, backward and SGD with momentum, parameters donated, float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.peers.worker import Row, print_row, timed_row, worker_flags  # noqa: E402  the checkout comes first


def measure(args: argparse.Namespace) -> Row:
    """The row of one point."""
    import jax
    import jax.numpy as jnp

    from benchmarks.peers.jax_models import MODELS, initial

    shape = (*args.input_shape[1:], args.input_shape[0]) if len(args.input_shape) == 3 else args.input_shape
    network = MODELS[args.model]
    parameters, states = initial(network, shape, args.classes)
    momenta = {name: jnp.zeros_like(value) for name, value in parameters.items()}
    x = jax.random.normal(jax.random.key(1), (args.batch_size, *shape))
    y = jnp.arange(args.batch_size) % args.classes

    def loss(parameters, states):  # type: ignore[no-untyped-def]
        logits, changed = network.run(parameters, states, x, args.classes)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
        return -chosen.mean(), changed

    def update(parameters, momenta, states):  # type: ignore[no-untyped-def]
        gradients, states = jax.grad(loss, has_aux=True)(parameters, states)
        momenta = {name: 0.9 * momenta[name] + gradients[name] for name in parameters}
        return {name: parameters[name] - 1e-3 * momenta[name] for name in parameters}, momenta, states

    jitted = jax.jit(update, donate_argnums=(0, 1, 2))
    held = [parameters, momenta, states]

    def step() -> None:
        held[:] = jitted(*held)
        jax.block_until_ready(held)

    row: Row = {"version": jax.__version__, "parameters": sum(value.size for value in parameters.values())}
    return row | timed_row(step, args, (RuntimeError, ValueError))


def main() -> int:
    args = worker_flags(__doc__).parse_args()
    # XLA has a thread a core that the process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    print_row(measure(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
